"""`depthgate isoflop`."""

from depthgate.isoflop.study import run as run
