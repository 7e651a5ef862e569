"""Packed sequences against a naive twin, as permutations, and as streams that may start anywhere."""

import subprocess
import sys
import threading
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgate.data.batches import Packed, batches, permuted, validation_rows, windows
from depthgate.data.token_file import Documents, TokenFile, split, write
from depthgate.data.tokenizer import ByteTokenizer
from depthgate.errors import DepthgateError

BYTES = ByteTokenizer()
END = BYTES.end
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def texts_of(lengths):
    """Texts in which no two neighbours are alike, so that a token in the wrong place shows."""
    letters = (chr(33 + i % 90) for i in range(10**6))
    return ["".join(islice(letters, n)) for n in lengths]


def documents_of(folder, lengths):
    write(folder / "a.tokens", texts_of(lengths), BYTES)
    return Documents(TokenFile(folder / "a.tokens"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return documents_of(tmp_path_factory.mktemp("many"), [3 + 7 * i % 41 for i in range(200)])


def naive(lengths, start, context, cap=None):
    """One window, token by token, from the texts themselves."""
    run = [(token, d) for d, text in enumerate(texts_of(lengths)) for token in [*text.encode(), END]]
    rows, pieces, pos = [], -1, 0
    for i in range(start, start + context):
        if i >= len(run):
            rows.append((0, -1, -1, -1))
            continue
        token, d = run[i]
        if i == start or run[i - 1][1] != d:
            pieces, pos = pieces + 1, 0
        after = run[i + 1] if i + 1 < len(run) else (None, None)
        if cap is not None and pieces >= cap:
            rows.append((0, -1, -1, -1))
        else:
            rows.append((token, after[0] if after[1] == d else -1, pos, pieces))
        pos += 1
    return [list(column) for column in zip(*rows, strict=True)]


@given(sizes, st.integers(1, 20), st.integers(0, 60), st.none() | st.integers(1, 4))
def test_windows_are_those_of_the_naive_twin(tmp_path_factory, lengths, context, start, cap):
    documents = documents_of(tmp_path_factory.mktemp("w"), lengths)
    rows = windows(documents, [start, 0], context, cap)
    for row, begin in ((0, start), (1, 0)):
        assert [part[row].tolist() for part in rows] == naive(lengths, begin, context, cap)
    assert all(part.dtype is torch.int64 for part in rows)


@given(sizes, st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_has_every_token_once_but_for_the_tail(tmp_path_factory, lengths, context, seed):
    documents = documents_of(tmp_path_factory.mktemp("e"), lengths)
    if len(documents) <= context:
        return
    packed = Packed(documents, context, seed)
    run = [token for text in texts_of(lengths) for token in [*text.encode(), END]]
    used = (len(run) - 1) // context * context
    assert len(run) - used <= context
    for epoch in range(2):
        numbers = range(epoch * len(packed), (epoch + 1) * len(packed))
        by_place = {packed.window(i): packed[i].tokens.tolist() for i in numbers}
        assert [token for w in sorted(by_place) for token in by_place[w]] == run[:used]


def test_a_split_is_packed_without_the_documents_held_out(many):
    train, held = split(many.file, 0.2)
    packed = Packed(train, 16)
    ends = sum(int((packed[i].tokens == END).sum()) for i in range(len(packed)))
    assert abs(ends - (len(train.bounds) - 1)) <= 1
    assert sum(int((rows.tokens == END).sum()) for rows in validation_rows(held, 16)) >= len(held.bounds) - 2


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(n, key):
    assert sorted(permuted(i, n, key) for i in range(n)) == list(range(n))


def test_permutations_look_random():
    """Means over 200 keys, against those of uniform permutations: 1 fixed point, 1 pair of neighbours kept (of 999
    with chance 1/1000 each), correlations with a deviation of 1/sqrt(n - 1)."""
    n, keys = 1000, 200
    fixed = kept = squares = 0.0
    seen = set()
    for key in range(keys):
        order = torch.tensor([permuted(i, n, key) for i in range(n)])
        seen.add(tuple(order.tolist()))
        fixed += int((order == torch.arange(n)).sum()) / keys
        kept += int((order.diff() == 1).sum()) / keys
        squares += float(torch.corrcoef(torch.stack([order, torch.arange(n)]).double())[0, 1] ** 2) / keys
    assert len(seen) == keys
    assert abs(fixed - 1) < 0.25  # the deviation of such a mean is 0.07
    assert abs(kept - 1) < 0.25
    assert abs(squares * (n - 1) - 1) < 0.35  # and of this one 0.1
    assert len({tuple(permuted(i, 4, key) for i in range(4)) for key in range(300)}) == 24  # every order is reached


def test_the_order_differs_between_epochs_and_seeds(many):
    packed, other = Packed(many, 16, seed=1), Packed(many, 16, seed=2)
    size = len(packed)
    first = [packed.window(i) for i in range(size)]
    assert first != [packed.window(size + i) for i in range(size)]
    assert first != [other.window(i) for i in range(size)]


def test_the_order_is_pinned():
    """A run resumed by a later version must see the same order."""
    assert [permuted(i, 10, 1) for i in range(10)] == [7, 4, 6, 1, 0, 2, 3, 9, 8, 5]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 3, 1000])
def test_any_number_of_workers_gives_the_same_stream(many, workers, start):
    packed = Packed(many, 16, seed=3, max_documents=2)
    steps = 2 * len(packed) // 6 + 2  # over the end of an epoch
    alone = islice(batches(packed, 6, start), steps)
    helped = islice(batches(packed, 6, start, workers), steps)
    for a, b in zip(alone, helped, strict=True):
        assert equal(a, b)


@given(st.integers(0, 500), st.integers(1, 7), st.integers(0, 5))
def test_a_stream_may_be_left_and_taken_up_anywhere(many, start, batch, steps):
    packed = Packed(many, 16, seed=3)
    whole = list(islice(batches(packed, batch, start), steps + 2))
    place = start + (steps + 1) * batch
    assert equal(next(batches(packed, batch, place)), whole[steps + 1])
    for i in range(batch):
        assert equal(packed[start + i], [part[i] for part in whole[0]])


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_out_each_batch(many, world):
    packed = Packed(many, 16)
    whole = list(islice(batches(packed, 6, 10), 4))
    parts = [list(islice(batches(packed, 6, 10, rank=r, world=world), 4)) for r in range(world)]
    for step, batch in enumerate(whole):
        for r in range(world):
            assert equal([part[r::world] for part in batch], parts[r][step])


def test_documents_beyond_the_cap_are_padding(tmp_path):
    packed = Packed(documents_of(tmp_path, [1] * 20), 8, max_documents=3)
    row = packed[0]
    assert row.doc.tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert row.pos.tolist() == [0, 1, 0, 1, 0, 1, -1, -1]
    assert row.targets[1::2].tolist() == [-1] * 4
    assert (row.targets[:6:2] == END).all()


def test_validation_has_every_token_once_in_order_and_pads_the_last(many):
    run = torch.cat([rows.tokens[rows.pos >= 0] for rows in validation_rows(many, 16, batch=4)])
    where = many.documents_at(torch.tensor([0]), len(many))[0]
    expected = many.read(torch.arange(len(many)), where)
    assert torch.equal(run, expected[: len(run)])
    assert len(many) - len(run) in (0, 1)  # a last token alone predicts nothing
    targets = sum(int((rows.targets >= 0).sum()) for rows in validation_rows(many, 16, batch=4))
    assert targets == len(many) - (len(many.bounds) - 1)  # all but each document's first
    last = list(validation_rows(many, 1000, batch=4))[-1]
    assert last.tokens.shape == (4, 1000)
    assert (last.pos[-1] == -1).any()
    assert torch.equal(last.pos == -1, last.doc == -1)
    assert (last.targets[last.pos == -1] == -1).all()


def test_too_little_data_is_refused_with_both_numbers(tmp_path):
    documents = documents_of(tmp_path, [7, 7])
    assert len(Packed(documents, 15)) == 1
    with pytest.raises(
        DepthgateError, match="the data has 16 tokens to train on, but a sequence takes context \\+ 1 = 17"
    ):
        Packed(documents, 16)


def test_bad_values_are_refused(many):
    for bad in ({"context": 0}, {"context": 2.5}, {"seed": -1}, {"max_documents": 0}):
        with pytest.raises(DepthgateError, match=next(iter(bad))):
            Packed(many, **({"context": 16} | bad))
    packed = Packed(many, 16)
    for bad in (
        {"batch": 0},
        {"start": -1},
        {"workers": -1},
        {"rank": 2, "world": 2},
        {"world": 3},
        {"workers": 10**6},
    ):
        with pytest.raises(DepthgateError, match=next(iter(bad))):
            batches(packed, **({"batch": 4} | bad))
    with pytest.raises(DepthgateError, match="sequence number is -1"):
        packed[-1]


def test_a_stream_that_is_left_ends_its_workers(many):
    stream = batches(Packed(many, 16), 4, workers=2)
    next(stream)
    stream.close()
    for worker in [thread for thread in threading.enumerate() if thread.name.startswith("depthgate-data")]:
        worker.join(60)
        assert not worker.is_alive()


def test_an_interrupted_process_ends(many):
    code = f"""
import os, signal
from depthgate.data.batches import Packed, batches
from depthgate.data.token_file import Documents, TokenFile
stream = batches(Packed(Documents(TokenFile({str(many.file.path)!r})), 16), 4, workers=2)
for step, batch in enumerate(stream):
    if step == 5:
        os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode != 0


def test_a_worker_that_fails_says_so(many, monkeypatch):
    packed = Packed(many, 16)
    monkeypatch.setattr(packed, "rows", lambda numbers: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(batches(packed, 4, workers=2))


@pytest.mark.parametrize("lengths", [[40], [3] * 30, [1, 50, 2, 2, 2, 2, 2, 9], [7, 1, 1, 30]])
def test_the_most_documents_of_a_window_are_those_counted_in_all_of_them(tmp_path, lengths):
    packed = Packed(documents_of(tmp_path, lengths), 8)
    counted = max(int(packed[i].doc.max()) + 1 for i in range(len(packed)))
    assert packed.most_documents == counted
