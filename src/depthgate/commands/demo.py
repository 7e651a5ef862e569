"""`depthgate demo`."""

from depthgate.demo.command import run as run
