"""From text to batches: sources, tokenizers, files of tokens, packed rows."""
