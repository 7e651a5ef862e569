"""Training: one loop for `train` and `finetune`, its steps, optimizers and run folders, and evaluation."""
