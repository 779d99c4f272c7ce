"""The demo model as it learns: DeepSeek-V3's arithmetic (tech report, sections 2.1 and 2.2) in plain torch, fp32 or
autocast. It is not the engine's model: it keeps no cache and computes whole windows.

Shape suffixes: B windows, T positions, D hidden, H heads, N no-position head dim, R rope dim, C latent, V value dim,
X experts, K experts a token, I expert width, S rows (B·T), Z vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu

from pd_ops.demo_model.shape import Shape

EMBEDDING_STD = 0.5   # 0.02 leaves the main head behind the MTP head
HEAD_STD = 0.02
MATRIX_GAIN = 0.6     # of 1 / sqrt(inputs)
OUTPUT_GAIN = 0.3     # more, for what is added to the residual stream


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotated(x_BHTR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """RoPE on interleaved pairs (0, 1), (2, 3), ...; cos and sin are [T, R/2]."""
    even, odd = x_BHTR[..., 0::2], x_BHTR[..., 1::2]
    return torch.stack((even * cos_TR - odd * sin_TR, even * sin_TR + odd * cos_TR), dim=-1).flatten(-2)


class LatentAttention(nn.Module):
    """MLA in its expanded form."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s, heads = shape, shape.num_attention_heads
        self.heads = heads
        self.widths_NR = [s.qk_nope_head_dim, s.qk_rope_head_dim]
        self.widths_CR = [s.kv_lora_rank, s.qk_rope_head_dim]
        self.widths_NV = [s.qk_nope_head_dim, s.v_head_dim]
        self.q_a_proj = linear(s.hidden_size, s.q_lora_rank)
        self.q_a_layernorm = RmsNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = linear(s.q_lora_rank, heads * sum(self.widths_NR))
        self.kv_a_proj_with_mqa = linear(s.hidden_size, sum(self.widths_CR))
        self.kv_a_layernorm = RmsNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = linear(s.kv_lora_rank, heads * sum(self.widths_NV))
        self.o_proj = linear(heads * s.v_head_dim, s.hidden_size)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_nope, q_rope = torch.split(self._per_head(queries), self.widths_NR, dim=-1)
        latent_BTC, k_rope_BTR = torch.split(self.kv_a_proj_with_mqa(x_BTD), self.widths_CR, dim=-1)
        expanded = self._per_head(self.kv_b_proj(self.kv_a_layernorm(latent_BTC)))
        k_nope, values = torch.split(expanded, self.widths_NV, dim=-1)
        q_rope = rotated(q_rope, cos_TR, sin_TR).to(q_nope.dtype)
        k_rope = rotated(k_rope_BTR.unsqueeze(1), cos_TR, sin_TR).to(k_nope.dtype)  # one for all heads
        queries = torch.cat((q_nope, q_rope), dim=-1)
        keys = torch.cat((k_nope, k_rope.expand_as(q_rope)), dim=-1)
        # Values are padded to the width of keys: torch's fused attention wants both alike.
        padded = pad(values, (0, sum(self.widths_NR) - values.shape[-1]))
        out_BHTV = scaled_dot_product_attention(queries, keys, padded, is_causal=True)[..., : values.shape[-1]]
        return self.o_proj(out_BHTV.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _per_head(self, x: Tensor) -> Tensor:
        """[B, T, H·w] -> [B, H, T, w]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Gate(nn.Module):
    """The noaux_tc router: sigmoid scores; a correction bias has a say in which experts, none in their weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))

    def forward(self, x_SD: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [S, K], experts [S, K])."""
        with torch.autocast("cpu", enabled=False):
            scores_SX = torch.sigmoid(x_SD.float() @ self.weight.float().mT)
        experts_SK = self._chosen(scores_SX.detach() + self.e_score_correction_bias)
        weights_SK = scores_SX.gather(1, experts_SK)
        scale = self.shape.routed_scaling_factor
        return weights_SK / (weights_SK.sum(dim=-1, keepdim=True) + 1e-20) * scale, experts_SK

    def _chosen(self, biased_SX: Tensor) -> Tensor:
        """The best experts of the best groups; a group counts the sum of its two best."""
        grouped = biased_SX.view(len(biased_SX), self.shape.n_group, -1)
        best_groups = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.shape.topk_group, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best_groups, True)
        candidates = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return candidates.topk(self.shape.num_experts_per_tok, dim=-1).indices


class MoE(nn.Module):
    """Routed experts, as stacks of matrices, and the shared expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate = Gate(shape)
        self.gate_up_XID = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_XDI = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = Mlp(hidden, width * shape.n_shared_experts)

    def forward(self, x_BTD: Tensor, load_X: Tensor) -> Tensor:
        """Adds to `load_X` how many rows went to each expert."""
        x_SD = x_BTD.flatten(0, 1)
        weights_SK, experts_SK = self.gate(x_SD)
        order = experts_SK.flatten().argsort(stable=True)
        rows = order // experts_SK.shape[1]
        counts_X = torch.bincount(experts_SK.flatten(), minlength=len(load_X))
        load_X += counts_X
        parts = torch.split(x_SD[rows], counts_X.tolist())
        experts = zip(parts, self.gate_up_XID.unbind(), self.down_XDI.unbind(), strict=True)
        done = [self._expert(part, gate_up, down) for part, gate_up, down in experts if len(part)]
        weighted = torch.cat(done).float() * weights_SK.flatten()[order].unsqueeze(-1)
        routed_SD = torch.zeros(x_SD.shape, dtype=torch.float32).index_add(0, rows, weighted)
        return (routed_SD.to(x_SD.dtype) + self.shared_experts(x_SD)).view_as(x_BTD)  # type: ignore[no-any-return]

    @staticmethod
    def _expert(x_SD: Tensor, gate_up_2ID: Tensor, down_DI: Tensor) -> Tensor:
        gate, up = product(x_SD, gate_up_2ID).chunk(2, dim=-1)
        return product(silu(gate) * up, down_DI)


class Layer(nn.Module):
    def __init__(self, shape: Shape, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp: Mlp | MoE = Mlp(shape.hidden_size, shape.intermediate_size) if dense else MoE(shape)

    def forward(self, x_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor, load_X: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TR, sin_TR)
        normed = self.post_attention_layernorm(x_BTD)
        out: Tensor = self.mlp(normed, load_X) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return x_BTD + out


class MtpLayer(nn.Module):
    """Predicts the token after the next from (embedding of the next, the main model's state after its last norm)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = linear(2 * shape.hidden_size, shape.hidden_size)
        self.layer = Layer(shape, dense=False)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, next_BTD: Tensor, h_BTD: Tensor, cos_TR: Tensor, sin_TR: Tensor, load_X: Tensor) -> Tensor:
        joined = self.eh_proj(torch.cat((self.enorm(next_BTD), self.hnorm(h_BTD)), dim=-1))
        return self.norm(self.layer(joined, cos_TR, sin_TR, load_X))  # type: ignore[no-any-return]


class DemoModel(nn.Module):
    """The main model and its MTP layer; both use the same embedding and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, dense=i < shape.first_k_dense_replace) for i in range(shape.num_hidden_layers)
        )
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self.mtp = MtpLayer(shape)
        self._initialize()

    def forward(self, ids_BT: Tensor, next_ids_BT: Tensor, loads_LX: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, Z] of the next token (main) and of the one after (MTP).

        Args:
            ids_BT: int64.
            next_ids_BT: the token after each of them.
            loads_LX: int64, a row for each MoE layer (`moe_layers`): the number of rows given to each expert is added.
        """
        cos_TR, sin_TR = self._rotation(ids_BT.shape[1])
        loads = iter(loads_LX)
        unused = torch.zeros_like(loads_LX[0])
        x_BTD: Tensor = self.embed_tokens(ids_BT)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x_BTD = layer(x_BTD, cos_TR, sin_TR, next(loads) if isinstance(layer.mlp, MoE) else unused)
        h_BTD = self.norm(x_BTD)
        mtp_BTD = self.mtp(self.embed_tokens(next_ids_BT), h_BTD, cos_TR, sin_TR, next(loads))
        return self.lm_head(h_BTD), self.lm_head(mtp_BTD)

    def moe_layers(self) -> list[MoE]:
        """In the order of `loads_LX`: the main model's, then MTP's."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def _rotation(self, positions: int) -> tuple[Tensor, Tensor]:
        width = self.shape.qk_rope_head_dim
        frequencies = self.shape.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_TR = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        return angles_TR.cos(), angles_TR.sin()

    def _initialize(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = MATRIX_GAIN * parameter.shape[-1] ** -0.5
            if name.startswith("embed_tokens"):
                std = EMBEDDING_STD
            elif name.startswith("lm_head"):
                std = HEAD_STD
            elif any(part in name for part in ("o_proj", "down_proj", "down_XDI")):
                std *= OUTPUT_GAIN
            nn.init.normal_(parameter, std=std)
