"""Windows of attention: kept where a family has one, and none where its config names one that the family ignores."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch

import depthgate as dg
from depthgate.cli import main
from depthgate.hf.layer import RoutedLayer
from tests.conftest import close
from tests.hf.zoo import FAMILY_NAMES, ROUTED, dense, tokens


def windowed(kind, window, **more):
    """A model whose config names a window, whatever its family makes of it."""
    model = dense(kind)
    config = type(model.config)(**{**model.config.to_dict(), "sliding_window": window, **more})
    again = type(model)(config)
    again.load_state_dict(model.state_dict())
    return again.eval()


@pytest.mark.parametrize("kind", FAMILY_NAMES)
@torch.no_grad()
def test_a_config_with_a_window_is_read_as_its_family_reads_it(kind):
    ids = tokens(2, 20)
    model = windowed(kind, 6, use_sliding_window=True)
    want = model(ids, use_cache=False).logits
    ignored = torch.allclose(want, windowed(kind, 64, use_sliding_window=True)(ids, use_cache=False).logits)
    dg.hf.convert(model, 1.0, ROUTED)
    close(model(ids, use_cache=False).logits, want)
    close(model(ids, use_cache=False, causal_routing=False).logits, want)
    assert ignored == (kind not in ("mistral", "phi3", "mixtral", "qwen3_moe", "qwen3", "gemma3_text"))  # as built here


@pytest.mark.parametrize(("window", "room", "found"), [(80, 128, True), (80, 72, False), (1030, 2048, False)])
def test_convert_looks_beyond_a_window_where_there_is_room(tmp_path, capsys, monkeypatch, window, room, found):
    """Of a model whose routed layers lose it."""
    windowed("mistral", window, max_position_embeddings=room).save_pretrained(tmp_path / "dense")
    command = ["convert", "--model", str(tmp_path / "dense"), "--out"]
    assert main([*command, str(tmp_path / "right")]) == 0
    monkeypatch.setattr(RoutedLayer, "_window", lambda *_: None)
    assert main([*command, str(tmp_path / "wrong")]) == (2 if found else 0)
    assert ("differ from those of the source" in capsys.readouterr().err) == found
    assert (tmp_path / "wrong").exists() != found
