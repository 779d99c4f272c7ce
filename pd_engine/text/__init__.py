"""Text at the edges of the system: tokenizer, chat template, output text, sampling defaults. Never imports torch."""
