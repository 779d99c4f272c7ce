"""The tokenizer: byte-level BPE, with DeepSeek's special tokens and V3's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pd_ops.demo_model.shape import ASSISTANT_ID, BOS_ID, EOS_ID, PAD_ID, USER_ID, Shape

SPECIAL_TOKENS = {
    BOS_ID: "<｜begin▁of▁sentence｜>",
    EOS_ID: "<｜end▁of▁sentence｜>",
    PAD_ID: "<｜▁pad▁｜>",
    USER_ID: "<｜User｜>",
    ASSISTANT_ID: "<｜Assistant｜>",
}

# V3's rules: bos, then all system texts with an empty line between them, then the turns; eos ends the assistant's.
CHAT_TEMPLATE = (
    "{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') -%}"
    "{{ bos_token }}{{ system | join('\\n\\n') }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"
)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer whose first ids are `SPECIAL_TOKENS`, then the 256 bytes, then merges learnt from the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL_TOKENS[token_id] for token_id in sorted(SPECIAL_TOKENS)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    assert all(tokenizer.token_to_id(text) == token_id for token_id, text in SPECIAL_TOKENS.items())
    return tokenizer


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(tokenizer: Tokenizer, shape: Shape, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    generation = {
        "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.7, "top_p": 0.95
    }
    for name, content in (("tokenizer_config", tokenizer_config(shape)), ("generation_config", generation)):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
