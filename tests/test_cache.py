"""The cache against a list of entries for each row, whatever is done to it in whatever order."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from depthgate.cache import LayerCache

G, D = 2, 3


class Against(RuleBasedStateMachine):
    """Every row is a list of (position, number); the number stands for its key, the negative for its value."""

    @initialize(rows=st.integers(1, 4))
    def start(self, rows):
        self.cache = LayerCache(rows)
        self.model = [[] for _ in range(rows)]
        self.number = 0.0

    def entries(self, data, rows):
        """Tokens for some rows: ascending positions after what each holds, some of them padding."""
        T = data.draw(st.integers(1, 20))
        pos = torch.full((len(rows), T), -1)
        key = torch.zeros(len(rows), G, T, D)
        for a, row in enumerate(rows):
            at = self.model[row][-1][0] + 1 if self.model[row] else 0
            for t in range(T):
                self.number += 1
                key[a, :, t] = self.number  # padding has keys too, which must not be stored
                if data.draw(st.booleans()):
                    at += data.draw(st.integers(0, 3))
                    pos[a, t] = at
                    self.model[row].append((at, self.number))
                    at += 1
        return key, -key, pos

    def check(self, rows, given):
        k, v, pos = given
        for a, row in enumerate(rows):
            held = [t for t in range(pos.shape[1]) if pos[a, t] >= 0]
            assert [(int(pos[a, t]), float(k[a, 0, t, 0])) for t in held] == self.model[row]
            assert (k[a][:, held] == -v[a][:, held]).all()
            assert (k[a][:, held] == k[a, :1, held, :1]).all()

    @rule(data=st.data())
    def append(self, data):
        rows = range(len(self.model))
        self.check(rows, self.cache.append(*self.entries(data, rows)))

    @rule(data=st.data())
    def append_to_some(self, data):
        rows = data.draw(st.lists(st.sampled_from(range(len(self.model))), min_size=1, unique=True))
        self.check(rows, self.cache.at(torch.tensor(rows)).append(*self.entries(data, rows)))

    @rule(position=st.integers(0, 60))
    def crop(self, position):
        self.cache.crop(position)
        self.model = [[e for e in row if e[0] < position] for row in self.model]

    @rule(data=st.data())
    def crop_each(self, data):
        limits = [data.draw(st.integers(0, 60)) for _ in self.model]
        self.cache.crop(torch.tensor(limits))
        self.model = [[e for e in row if e[0] < n] for row, n in zip(self.model, limits, strict=True)]

    @precondition(lambda self: len(self.model) <= 4)
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.sampled_from(range(len(self.model))), min_size=1, max_size=6))
        fewer = len(rows) < len(self.model)
        self.cache.select(torch.tensor(rows))
        self.model = [list(self.model[row]) for row in rows]
        if fewer and self.cache.store is not None:
            assert self.cache.store.size == max(len(row) for row in self.model)

    @invariant()
    def lengths(self):
        if getattr(self, "cache", None) is not None and self.cache.store is not None:
            assert self.cache.store.lengths.tolist() == [len(row) for row in self.model]
            assert self.cache.most >= max(len(row) for row in self.model)


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAgainstLists = Against.TestCase


def test_growing_copies_seldom():
    """A token at a time, memory changes hands a logarithmic number of times, and ends a quarter too large at most."""
    cache, moves, last = LayerCache(2), 0, None
    one = torch.zeros(2, 1, 1, 4)
    for t in range(2000):
        cache.append(one, one, torch.full((2, 1), t))
        moves += cache.store.k is not last
        last = cache.store.k
    assert moves < 40
    assert cache.store.size <= 1.25 * 2000 + 8


def test_memory_follows_the_longest_row_not_the_steps():
    """Rows that enter in turns: the host's bound grows with every step, the memory with the longest row."""
    cache = LayerCache(8)
    one = torch.zeros(1, 1, 1, 4)
    for t in range(800):
        cache.at(torch.tensor([t % 8])).append(one, one, torch.tensor([[t]]))
    assert cache.store.lengths.tolist() == [100] * 8
    assert cache.store.k.shape[2] <= 160


def test_rows_change_places_and_come_several_times():
    cache = LayerCache(2)
    k = torch.arange(2.0)[:, None, None, None].expand(2, 1, 1, 4)
    cache.append(k, k, torch.zeros(2, 1, dtype=torch.long))
    cache.select(torch.tensor([0, 0, 1, 1]))
    assert cache.store.k[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    cache.select(torch.tensor([3, 0]))
    assert cache.store.k[:, 0, 0, 0].tolist() == [1, 0]
    assert cache.rows == 2
    assert cache.nbytes == cache.store.k.nbytes + cache.store.v.nbytes
    cache.crop(0)
    assert cache.store.lengths.tolist() == [0, 0]
