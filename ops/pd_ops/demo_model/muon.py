"""Muon (Jordan et al., 2024): momentum whose singular values are all brought near one before each step.

torch.optim has a Muon for single matrices that works in bf16. Here experts are stacks of matrices, and a CPU without
bf16 instructions takes 40 times as long for bf16 products as for fp32 ones: so the arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of Jordan et al.: steep at zero, near one on [0.7, 1.2]
NEWTON_SCHULZ_STEPS = 5


def orthogonalized(gradient: Tensor) -> Tensor:
    """The last two dims with the same singular vectors and singular values near one; stacks are done at once."""
    a, b, c = NEWTON_SCHULZ
    tall = gradient.shape[-2] > gradient.shape[-1]
    x = gradient.mT if tall else gradient
    x = x / x.flatten(-2).norm(dim=-1).clamp_min(1e-7)[..., None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x  # type: ignore[no-any-return]


class Muon(torch.optim.Optimizer):
    """For matrices [M, N] and stacks of them [..., M, N].

    Args:
        lr: of an update whose singular values are one; a tall matrix's is larger by sqrt(M / N).
        momentum: Nesterov's.
        weight_decay: decoupled, a step takes lr * weight_decay of each weight.
    """

    def __init__(
        self, parameters: Iterable[Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "no line search here"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameter: Parameter, gradient: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        average: Tensor = state["average"].lerp_(gradient, 1 - momentum)
        update = orthogonalized(gradient.lerp(average, momentum))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-lr * max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5)
