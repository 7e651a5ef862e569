"""Windows of attention: kept where a family has one, and none where its config names one that the family ignores."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'depthgate[hf]'")

import torch
from transformers import DynamicCache

import depthgate as dg
from depthgate.cli import main
from depthgate.hf.layer import RoutedLayer
from tests.conftest import close
from tests.hf.zoo import FAMILY_NAMES, ROUTED, dense, routed, tokens, with_random_routers


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


def size(cache):
    return [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]


@pytest.mark.parametrize(("kind", "window"), [("mistral", 8), ("gemma3_text", 16)])
@torch.no_grad()
def test_a_routed_layer_drops_what_has_left_its_window(kind, window):
    """Read in pieces, then token by token: never more than the dense model keeps, and the logits of one pass."""
    model, ids = windowed(kind, window, max_position_embeddings=512), tokens(2, 120)
    plain = DynamicCache(config=model.config)
    model(ids, past_key_values=plain)
    with_random_routers(dg.hf.convert(model, 0.5, ROUTED))
    want, cache, got = model(ids, use_cache=False).logits, DynamicCache(config=model.config), []
    for piece in ids.split((90, 10, *[1] * 20), 1):
        got.append(model(piece, past_key_values=cache).logits)
        assert all(mine <= dense for mine, dense in zip(size(cache), size(plain), strict=True))
    close(torch.cat(got, 1), want)


@torch.no_grad()
def test_tokens_are_taken_back_out_of_a_window_only_if_it_was_asked_to_remember():
    model, ids = routed("mistral"), tokens(1, 40)
    want = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :30], past_key_values=cache)
    for layer in cache.layers:
        layer.activate_past_recording()
    model(ids[:, 30:35], past_key_values=cache)
    cache.crop(-3)
    close(model(ids[:, 32:], past_key_values=cache).logits, want[:, 32:])
    forgetful = DynamicCache(config=model.config)
    model(ids[:, :30], past_key_values=forgetful)
    with pytest.raises(dg.DepthgateError, match="activate_past_recording"):
        forgetful.layers[0].crop(-3)
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    again = ids[:, :6].repeat(1, 3)
    for more in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(again, **how, **more), model.generate(again, **how, use_cache=False))
