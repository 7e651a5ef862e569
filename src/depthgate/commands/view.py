"""`depthgate view`: what a model does with a text, or how runs went; as a page or a picture."""

import sys
from io import TextIOWrapper

from depthgate.view.config import ViewConfig


def run(config: ViewConfig, as_json: bool) -> None:
    """One of the two."""
    if isinstance(sys.stdout, TextIOWrapper):  # a path may hold any bytes
        sys.stdout.reconfigure(errors="surrogateescape")
    if config.model is not None:
        from depthgate.view.models import show
    else:
        from depthgate.view.compare_runs import show
    show(config, as_json)
