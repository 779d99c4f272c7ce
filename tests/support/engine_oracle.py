"""transformers' DeepSeek-V3 in fp32 as the oracle of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from pd_engine.model.config import ModelConfig


class Oracle:
    """Main model and MTP layer of one checkpoint."""

    def __init__(self, path: Path) -> None:
        config = ModelConfig.load(path)
        # transformers looks for MTP weights by this pattern, which it hard-wires to layer 61.
        DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{config.num_hidden_layers}\..*"
        ]
        self.main: Any = DeepseekV3ForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._mtp: Any = MtpModel.from_pretrained(self.main).eval() if config.has_mtp else None

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> Tensor:
        """h after the final norm: [T, D]."""
        result: Tensor = self.main.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return result

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, Z]."""
        result: Tensor = self.main(input_ids=torch.tensor([ids])).logits[0]
        return result

    @torch.no_grad()
    def mtp_logits(self, ids: Sequence[int]) -> Tensor:
        """Of MTP rows 1..T-1, each from (h of the position before, its token): [T-1, Z]."""
        states = self._mtp.forward_layer(
            0, self.hidden(ids)[None, :-1], torch.arange(1, len(ids))[None], None, input_ids=torch.tensor([ids[1:]])
        )
        result: Tensor = self._mtp._project_to_logits(states)[0]
        return result

    @torch.no_grad()
    def mtp_drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` greedy drafts after the last of `ids`, whose own h is not known yet: each further row takes the
        state of the row before it. Written out over whole sequences, without a cache."""
        tokens, states = list(ids[1:]), self.hidden(ids)[:-1]
        drafts: list[int] = []
        for _ in range(count):
            positions = torch.arange(1, len(tokens) + 1)[None]
            rows = self._mtp.forward_layer(0, states[None], positions, None, input_ids=torch.tensor([tokens]))[0]
            drafts.append(int(self._mtp._project_to_logits(rows[-1:]).argmax()))
            tokens, states = [*tokens, drafts[-1]], torch.cat([states, rows[-1:]])
        return drafts

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens, whatever they are."""
        output = self.main.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(ids) :]]
