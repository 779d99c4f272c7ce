"""Arguments that every op takes, to be spoilt one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pd_kernels.ops import Rows, SamplingRows

T, D, H, N, V, C, R, X, K = 4, 32, 3, 16, 12, 32, 8, 4, 2
NUM_BLOCKS, BLOCK_SIZE, NUM_POSITIONS = 8, 16, 64
E = C + R


@dataclass(frozen=True, kw_only=True)
class Case:
    """Right arguments of every op, to be spoilt one at a time."""

    x: Tensor
    norm: Tensor
    q: Tensor
    queries: Tensor
    kv: Tensor
    latent_norm: Tensor
    rope: Tensor
    cache: Tensor
    rows: Rows
    logits: Tensor
    sampling: SamplingRows
    weights: Tensor
    experts: Tensor


def case() -> Case:
    torch.manual_seed(0)
    return Case(
        x=torch.randn(T, D), norm=torch.ones(D), q=torch.randn(T, H * (N + R)), queries=torch.randn(T, H, E),
        kv=torch.randn(T, E), latent_norm=torch.ones(C), rope=torch.randn(NUM_POSITIONS, 2, R // 2),
        cache=torch.randn(NUM_BLOCKS, BLOCK_SIZE, E),
        rows=Rows(
            positions_T=torch.tensor([20, 21, 5, 40], dtype=torch.int32),
            sequence_T=torch.tensor([0, 0, 1, 1], dtype=torch.int32),
            block_tables_SB=torch.tensor([[0, 1, -1], [2, 3, 4]], dtype=torch.int32),
            slots_T=torch.tensor([20, 21, 37, 72]),
        ),
        logits=torch.randn(T, 57),
        sampling=SamplingRows(
            temperature_T=np.ones(T, np.float32), top_k_T=np.full(T, -1, np.int32), top_p_T=np.ones(T, np.float32),
            min_p_T=np.zeros(T, np.float32), seed_T=np.arange(T, dtype=np.uint64), position_T=np.arange(T)),
        weights=torch.rand(T, K), experts=torch.randint(0, X, (T, K), dtype=torch.int32),
    )
