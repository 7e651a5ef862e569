"""`depthgate eval --tasks`: a Hugging Face model, dense or converted, on a task of lm-eval."""
