"""Converts a checkpoint for llama.cpp with llama.cpp's own converter, without a tokenizer: a benchmark has token ids.

    llama_cpp_convert.py LLAMA_CPP_SOURCE CHECKPOINT OUTPUT OUT_TYPE

It leaves MTP layers out. Run by an interpreter with torch and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(source: str, checkpoint: str, output: str, out_type: str) -> None:
    sys.path[:0] = [str(Path(source) / "gguf-py"), source]
    import convert_hf_to_gguf
    from conversion.base import TextModel
    from conversion.deepseek import DeepseekV2Model

    DeepseekV2Model.set_vocab = TextModel._set_vocab_none
    sys.argv = ["convert", checkpoint, "--outfile", output, "--outtype", out_type]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
