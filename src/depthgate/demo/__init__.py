"""A Mixture-of-Depths language model and a dense one of equal training FLOPs, side by side."""
