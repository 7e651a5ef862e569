"""Checkpoints that are whole or not there: safetensors, a manifest of hashes, any number of processes."""
