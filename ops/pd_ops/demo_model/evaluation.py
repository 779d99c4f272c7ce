"""What a model has learnt, on text it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pd_ops.demo_model.corpus import Ids, windows
from pd_ops.demo_model.learning import Learner, autocast

EVALUATION_SEED = (1, 0)  # the same windows for every evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Held-out numbers, teacher-forced.

    Attributes:
        loss, mtp_loss: mean cross-entropy of the next token, and of the one after by the MTP layer; nats.
        top1, mtp_top1: share of positions whose most likely token is the text's.
        greedy_acceptance: share of MTP's most likely tokens that are the main model's.
        sampled_acceptance: mean of sum(min(p, q)) at temperature 1.
    """

    loss: float
    mtp_loss: float
    top1: float
    mtp_top1: float
    greedy_acceptance: float
    sampled_acceptance: float


@torch.no_grad()
def evaluate(learner: Learner, held_out: Ids, *, num_batches: int) -> Quality:
    """Means over `num_batches` of 4 windows each, always the same ones."""
    totals = torch.zeros(6)
    for batch in range(num_batches):
        seed = (*EVALUATION_SEED, batch)
        texts = windows(held_out, count=4, length=learner.recipe.window_tokens, seed=seed)
        totals += _batch_quality(learner, texts)
    means = [round(value, 4) for value in (totals / num_batches).tolist()]
    return Quality(**dict(zip(Quality.__slots__, means, strict=True)))


def _batch_quality(learner: Learner, texts_BW: torch.Tensor) -> torch.Tensor:
    """The fields of `Quality` for one batch, in order: [6]."""
    with autocast():
        main_BTZ, mtp_BTZ = learner.model(texts_BW[:, :-2], texts_BW[:, 1:-1], learner.new_loads())
    main, mtp = main_BTZ.float().log_softmax(dim=-1), mtp_BTZ.float().log_softmax(dim=-1)
    next_BT, after_BT = texts_BW[:, 1:-1], texts_BW[:, 2:]
    best, mtp_best = main.argmax(dim=-1), mtp.argmax(dim=-1)
    # MTP at position i and the main model at i + 1 speak of the same token.
    shared_mass = torch.minimum(main[:, 1:].exp(), mtp[:, :-1].exp()).sum(dim=-1)
    values = (
        -main.gather(-1, next_BT.unsqueeze(-1)), -mtp.gather(-1, after_BT.unsqueeze(-1)),
        best == next_BT, mtp_best == after_BT, mtp_best[:, :-1] == best[:, 1:], shared_mass,
    )
    return torch.stack([value.float().mean() for value in values])
