"""The shapes of DeepSeek-V3 on one GPU, and the tensors of its ops on any device.

On torch's meta device the tensors have shapes and no memory, which is all that a compilation needs. On others they are
random: weights scaled so that products keep the magnitude of their input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.absorb.triton import AbsorbedWeight, pack_absorbed
from pd_kernels.fp8_gemm.reference import Fp8Weight
from pd_kernels.fp8_matrix import Fp8Matrix
from pd_kernels.fp8_quant.reference import quantize_weight
from pd_kernels.latent_fp8.reference import encode, slot_bytes
from pd_kernels.moe_experts.triton import Experts
from pd_kernels.ops import GateConfig, Rows

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """Letters as in pd_kernels.ops; F the dense MLP's width, Q the queries' low rank."""

    D: int = 7168
    H: int = 128
    N: int = 128
    R: int = 64
    C: int = 512
    V: int = 128
    Q: int = 1536
    F: int = 18432
    X: int = 256
    K: int = 8
    I: int = 2048  # noqa: E741
    num_groups: int = 8
    num_groups_kept: int = 4
    Z: int = 129280
    block_size: int = 16

    @property
    def E(self) -> int:
        return self.C + self.R

    @property
    def scale(self) -> float:
        """σ of the checkpoint's YaRN settings."""
        return 0.1352337788608801

    @property
    def gate(self) -> GateConfig:
        return GateConfig(num_groups=self.num_groups, num_groups_kept=self.num_groups_kept,
                          num_experts_per_token=self.K, normalize=True, scale=2.5)


V3 = Dims()


@dataclass(frozen=True, slots=True)
class Maker:
    """Tensors on one device, from one seed."""

    device: torch.device
    generator: torch.Generator | None
    dtype: torch.dtype = torch.bfloat16  # of what is not asked for in another

    @classmethod
    def on(cls, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Maker:
        where = torch.device(device)
        generator = None if where.type == "meta" else torch.Generator(where).manual_seed(seed)
        return cls(where, generator, dtype)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        dtype = dtype or self.dtype
        if self.generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        result = torch.empty(shape, dtype=dtype, device=self.device)
        flat = result.view(-1, shape[-1])
        for part in flat.split(max(1, (1 << 27) // shape[-1])):  # half a gigabyte of float32 at a time
            part.copy_(torch.randn(part.shape, generator=self.generator, device=self.device) * scale)
        return result

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        if self.generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def fp8_weight(self, *shape: int) -> Fp8Weight:
        """[M, K] or [X, M, K], quantized a matrix at a time."""
        values = torch.empty(shape, dtype=FP8, device=self.device)
        blocks = [-(-size // 128) for size in shape[-2:]]
        scale = torch.empty(*shape[:-2], *blocks, dtype=torch.float32, device=self.device)
        if self.generator is not None:
            stacked, scales = values.view(-1, *shape[-2:]), scale.view(-1, *blocks)
            for index in range(stacked.shape[0]):
                quantized = quantize_weight(self.weight(*shape[-2:]))
                stacked[index].view(torch.uint8).copy_(quantized[0].view(torch.uint8))
                scales[index].copy_(quantized[1])
        return Fp8Weight(weight_MK=values, scale_mk=scale, power_of_two=False)

    def fp8_matrix(self, *shape: int) -> Fp8Matrix:
        """The same, for activations as they are."""
        weight = self.fp8_weight(*shape)
        return Fp8Matrix.from_blocks(weight.weight_MK, weight.scale_mk)

    def experts(self, dims: Dims, kind: str = "bf16") -> Experts:
        """All routed experts and the shared one: "bf16", "fp8", or "fp8 weights" for activations as they are."""
        make = {"bf16": self.weight, "fp8": self.fp8_weight, "fp8 weights": self.fp8_matrix}[kind]
        return Experts(gate_up=make(dims.X + 1, 2 * dims.I, dims.D), down=make(dims.X + 1, dims.D, dims.I),
                       num_shared=1)

    def routing(self, dims: Dims, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(weights_TK, experts_TK): different experts for each token, chosen alike."""
        weights = self.normal(num_tokens, dims.K, dtype=torch.float32).abs()
        if self.generator is None:
            return weights, self.integers(0, dims.X, num_tokens, dims.K)
        order = torch.rand(num_tokens, dims.X, generator=self.generator, device=self.device).argsort(dim=1)
        return weights, order[:, : dims.K].int().contiguous()

    def absorbed(self, dims: Dims) -> AbsorbedWeight:
        return pack_absorbed(self.weight(dims.H, dims.N, dims.C), self.weight(dims.H, dims.V, dims.C))

    def rope(self, dims: Dims, num_positions: int) -> Tensor:
        """cos and sin of plain angles: [P, 2, R/2]."""
        if self.generator is None:
            return self.normal(num_positions, 2, dims.R // 2, dtype=torch.float32)
        frequencies = 10000.0 ** (-torch.arange(0, dims.R, 2, device=self.device).double() / dims.R)
        angles = torch.arange(num_positions, device=self.device).double()[:, None] * frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=1).float()

    def cache(self, dims: Dims, num_blocks: int, *, fp8: bool = False) -> Tensor:
        """A cache whose slots are all filled."""
        if fp8 and self.generator is None:
            return self.normal(num_blocks, dims.block_size, slot_bytes(dims.C, dims.R), dtype=torch.uint8)
        latents = self.normal(num_blocks, dims.block_size, dims.E)
        if not fp8:
            return latents
        parts = [encode(part.flatten(0, 1).float(), dims.C) for part in latents.split(4096)]
        return torch.cat(parts).view(num_blocks, dims.block_size, -1)

    def rows(self, dims: Dims, contexts: list[int], queries: int) -> tuple[Rows, int]:
        """(the last `queries` rows of sequences with that many positions, number of blocks they need in all)."""
        counts = [-(-context // dims.block_size) for context in contexts]
        total, width = sum(counts), max(counts)
        order = (torch.randperm(total, generator=self.generator, device=self.device) if self.generator is not None
                 else torch.empty(total, dtype=torch.int64, device=self.device))
        tables = torch.full((len(contexts), width), -1, dtype=torch.int32, device=self.device)
        start = 0
        for row, count in enumerate(counts):
            tables[row, :count] = order[start : start + count].int()
            start += count
        ends = torch.tensor(contexts, dtype=torch.int32).to(self.device)
        back = torch.arange(queries, dtype=torch.int32).to(self.device)
        positions = (ends[:, None] - queries + back[None, :]).flatten()
        sequence = torch.arange(len(contexts), dtype=torch.int32).repeat_interleave(queries).to(self.device)
        block = tables[sequence.long(), (positions // dims.block_size).long()].long()
        slots = block * dims.block_size + positions.long() % dims.block_size
        return Rows(positions_T=positions.contiguous(), sequence_T=sequence, block_tables_SB=tables,
                    slots_T=slots), total
