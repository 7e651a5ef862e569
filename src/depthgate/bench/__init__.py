"""Measuring: times, FLOPs and memory, reported only where the answer was right."""
