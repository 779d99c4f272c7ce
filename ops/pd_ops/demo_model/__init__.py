"""The recipe of the demo checkpoint: from a text to a small DeepSeek-V3 model in Hugging Face format.

The files in the order of the work: `prose` cleans a text, `vocabulary` trains the tokenizer, `corpus` cuts batches,
`network` is the model, `muon` and `schedule` say how it learns, `evaluation` what it has learnt, `training` is the
loop that can be interrupted, `export` writes the checkpoint. Run it with `python -m pd_ops.demo_model --help`.
"""
