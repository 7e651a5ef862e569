"""Training: text and data, the loop, and checkpoints that survive a kill, a full disk and damage."""
