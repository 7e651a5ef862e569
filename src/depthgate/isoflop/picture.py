"""A held-out text as a cell's model routed it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthgate.checkpoint.store import CONFIG
from depthgate.data.token_file import cache_folder, prepare
from depthgate.errors import DepthgateError
from depthgate.loading import load
from depthgate.view import page as pages
from depthgate.view.page import Html, routed_text
from depthgate.view.routes import held_out_tokens, read


def routed_piece(cells: Path, row: Mapping[str, Any]) -> Html | None:
    """The beginning of a held-out document in the colours of a cell's routers; None where its folder is gone."""
    folder = cells / row["cell"]
    try:
        model = load(folder)
        asked = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        documents = prepare(asked["data"], model.tokenizer, cache_folder(), asked["validation"]).validation
    except (DepthgateError, OSError, ValueError, KeyError):
        return None  # its checkpoints may have been deleted: the figures are what matters
    found, _, _ = read(model, held_out_tokens(documents, 768))
    about = (
        f"{row['variant']}, {row['layers']} x {row['dim']}, {row['budget']:g} FLOPs, seed {row['seed']}: the start of "
        f"a held-out document. The deeper a token's colour and the thicker the line below it, the more of the routed "
        f"layers ({', '.join(map(str, found.layers))}) computed it under the causal choice; hovering names them."
    )
    return pages.join([pages.paragraph(about), routed_text(found.tokens, found.through, found.layers)])
