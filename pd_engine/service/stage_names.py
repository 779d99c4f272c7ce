"""The seven stages that a token goes through, in order. Torch-free: the router names the first and the last."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    __hash__ = object.__hash__  # looked up with every op

    TOKENIZE = "tokenize"    # in the router, with the chat template
    EMBED = "embed"          # embedding and position
    ROUTER = "router"        # which experts
    EXPERTS = "experts"      # and the dense layers' MLP
    ATTENTION = "attention"  # with projections, norms and the cache
    LOGITS = "logits"        # and sampling
    STREAMING = "streaming"  # in the router: detokenize, stop strings, pass on
