"""Text on its way to batches: sources, tokenizers, token files, packed rows."""
