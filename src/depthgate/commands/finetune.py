"""`depthgate finetune`."""

from depthgate.hf.finetune import run as run
