"""One step of learning, and what goes into it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from pd_ops.demo_model.muon import Muon
from pd_ops.demo_model.network import DemoModel
from pd_ops.demo_model.schedule import learning_rate_factor, router_bias_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a run is made of. Matrices learn by Muon, the rest (embedding, head, router, norms) by AdamW: that is worth
    about 1.5 times the CPU-seconds of AdamW alone."""

    seed: int = 0
    num_windows: int = 4       # a step
    window_tokens: int = 512
    threads: int = 2           # each takes its share of the windows
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    mtp_weight: float = 0.3
    max_gradient_norm: float = 1.0

    @property
    def step_tokens(self) -> int:
        return self.num_windows * self.window_tokens


def autocast() -> AbstractContextManager[Any]:
    """bf16 products where the CPU has instructions for them; elsewhere they would take 40 times as long as fp32's."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported())


def losses(model: DemoModel, windows: Tensor, loads_LX: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of (next token, token after it) over windows [B, T + 2]."""
    with autocast():
        main_BTZ, mtp_BTZ = model(windows[:, :-2], windows[:, 1:-1], loads_LX)
    main = cross_entropy(main_BTZ.float().flatten(0, 1), windows[:, 1:-1].flatten())
    return main, cross_entropy(mtp_BTZ.float().flatten(0, 1), windows[:, 2:].flatten())


class Learner:
    """A model and its optimizers."""

    def __init__(self, model: DemoModel, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.parameters = list(model.parameters())
        matrices = [parameter for name, parameter in model.named_parameters() if is_matrix(name, parameter)]
        chosen = {id(parameter) for parameter in matrices}
        rest = [parameter for parameter in self.parameters if id(parameter) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=recipe.muon_lr),
            torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [recipe.muon_lr, recipe.adamw_lr]
        self._moe_layers = model.moe_layers()

    def new_loads(self) -> Tensor:
        """Zero counts, [MoE layers, experts] int64."""
        return torch.zeros(len(self._moe_layers), self.model.shape.n_routed_experts, dtype=torch.int64)

    def step(self, windows: Tensor, *, step: int, done: float, pool: ThreadPoolExecutor) -> tuple[float, float]:
        """Learns from windows [B, T + 2] and returns their losses (main, MTP). The same windows, step and `done` give
        the same weights whatever the timing: shares are summed in order."""
        shares = windows.chunk(self.recipe.threads)
        results = list(pool.map(self._gradients, shares, [len(share) / len(windows) for share in shares]))
        for i, parameter in enumerate(self.parameters):
            parameter.grad = _sum(result.gradients[i] for result in results)
        clip_grad_norm_(self.parameters, self.recipe.max_gradient_norm)
        factor = learning_rate_factor(step, done)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance(torch.stack([result.loads_LX for result in results]).sum(dim=0), router_bias_rate(done))
        return sum(result.main for result in results), sum(result.mtp for result in results)

    def _gradients(self, windows: Tensor, weight: float) -> _Share:
        loads_LX = self.new_loads()
        main, mtp = losses(self.model, windows, loads_LX)
        total = weight * (main + self.recipe.mtp_weight * mtp)
        gradients = torch.autograd.grad(total, self.parameters, allow_unused=True)
        return _Share(gradients, loads_LX, weight * main.item(), weight * mtp.item())

    def _balance(self, loads_LX: Tensor, rate: float) -> None:
        """Experts with less than the mean load become likelier, those with more less likely."""
        for layer, load_X in zip(self._moe_layers, loads_LX.float(), strict=True):
            layer.gate.e_score_correction_bias += rate * torch.sign(load_X.mean() - load_X)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


@dataclass(frozen=True, slots=True)
class _Share:
    gradients: tuple[Tensor | None, ...]
    loads_LX: Tensor
    main: float
    mtp: float


def is_matrix(name: str, parameter: Parameter) -> bool:
    """Whether Muon moves it: every matrix but the embedding, the head and the router."""
    return parameter.dim() >= 2 and not name.startswith(("embed_tokens", "lm_head")) and ".gate.weight" not in name


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(dim=0) if present else None


