"""Generation: sampling, text piece by piece, and the engine that decodes."""
