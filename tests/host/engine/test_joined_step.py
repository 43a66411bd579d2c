# SPDX-License-Identifier: Apache-2.0
"""Sequences of a joined batch choose and attend in one native call: each as it does alone."""

import time

import numpy as np
import pytest
import torch
from placement_matrix import Budget

from hillinfer.engine.runtime import Runtime
from hillinfer.errors import CacheUseError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings

LAYERS = 3
SHAPE = ModelShape(
    layers=LAYERS,
    kv_heads=2,
    query_heads=4,
    head_dim=32,
    stored_type=StoredType.FLOAT16,
    max_positions=4096,
)
CHOSEN = Settings().changed(alpha=0.1, kept_recent=4)
SCALING = SHAPE.head_dim**-0.5
# Tokens before the first step; steps do not fill a group.
LENGTHS = (1100, 900, 1160)
BATCH = len(LENGTHS)


@pytest.fixture(params=[1, 2, 4], ids=lambda count: f"{count} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def states(seed, heads, tokens, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, SHAPE.head_dim, generator=generator)


class Rows:
    """A runtime and the sequences of a batch, which takes steps together or one row at a time."""

    def __init__(self, folder, budget=Budget.ALL_HOT, scope="layer", lengths=LENGTHS, **changes):
        settings = CHOSEN.changed(scope=scope, **changes)
        self.sets, self.alone, self.pause = [], [], 0.0
        byte_count = budget.byte_count(SHAPE, settings, max(lengths) + 100, len(lengths))
        folder.mkdir(exist_ok=True)
        self.runtime = Runtime(
            SHAPE,
            settings,
            byte_count,
            folder,
            observe_selected=lambda layer, length, sets: self.sets.append(
                (layer, length, np.stack(sets).tobytes())
            ),
        )
        self.sequences = []
        self.runtime.begin_step()
        for row, tokens in enumerate(lengths):
            sequence = self.runtime.open_sequence()
            self.sequences.append(sequence)
            for layer in range(LAYERS):
                keys, values = states(10 * row + layer, SHAPE.kv_heads, tokens, 2).half()
                self.runtime.append(layer, sequence, keys, values)
                self.runtime.code_full_segments(layer, sequence, keys)

    def step(self, number, joined, predicted=True, spoil=None):
        """Take one, and return the outputs, (layers, batch, query_heads, head_dim)."""
        self.runtime.begin_step()
        taken = self.begin() if joined else []
        self.alone.append(BATCH - len(taken))
        outputs = []
        for layer in range(LAYERS):
            query = states(1000 * number + layer, SHAPE.query_heads, 1)
            if spoil is not None:
                query[spoil] = torch.inf
            keys, values = states(500 * number + 7 * layer, 2 * SHAPE.kv_heads, 1).chunk(2, 1)
            if predicted and layer + 1 < LAYERS:
                self.announce(taken, layer + 1, states(99 * number + layer, 4, 1))
            outputs.append(self._attend(taken, layer, query, keys, values))
        return torch.stack(outputs)

    def begin(self):
        rows = list(enumerate(self.sequences))
        return self.runtime.joined.begin(rows, self.runtime.step, self.runtime.observe_selected)

    def announce(self, taken, layer, query):
        apart = self.runtime.joined.announce(layer, query, SCALING) if taken else set()
        for row, sequence in enumerate(self.sequences):
            if row not in taken or row in apart:
                self.runtime.announce(layer, sequence, query[row], SCALING)
        time.sleep(self.pause)

    def _attend(self, taken, layer, query, keys, values):
        out = torch.empty(BATCH, 1, SHAPE.query_heads, SHAPE.head_dim)
        if taken:
            self.runtime.joined.store(layer, keys, values)
        for row, sequence in enumerate(self.sequences):
            own = layer, sequence
            if row not in taken and not self.runtime.append_token(*own, keys, values, row):
                self.runtime.append(*own, keys[row].half(), values[row].half())
        apart = set(range(BATCH))
        if taken:
            apart -= set(taken) - self.runtime.joined.attend(layer, query, SCALING, out)
        for row in sorted(apart):
            attended = self.runtime.attend_selected(
                layer, self.sequences[row], query[row], None, SCALING
            )
            out[row, 0] = attended[:, 0]
        return out[:, 0]

    def counts(self):
        """Return what each sequence counts, and what all of them do."""
        every = (*(one.counters for one in self.sequences), self.runtime.counters)
        names = ("scored_tokens", "selected_tokens", "fp16_overflows")
        rows = [one.hot_rows_read + one.cold_rows_read for one in every]
        return [[getattr(one, name) for name in names] for one in every], rows

    def told(self):
        """Return what pools know of their rows: numbers, hits and lengths of contexts."""
        pools, found = self.runtime.parts.pools, []
        for layer, pool in enumerate(pools.layers):
            pools.hits.tell(layer)
            own = np.flatnonzero(pool.columns.rows[: pool.columns.used] >= 0)
            columns = pool.columns.rows, pool.columns.counts, pool.columns.lengths
            found.append(sorted(zip(*(column[own].tolist() for column in columns), strict=True)))
        return found

    def close(self):
        self.runtime.close()


# Any two of them meet.
@pytest.mark.parametrize(
    ("threads", "scope", "predicted"),
    [
        (count, scope, predicted)
        for count in (1, 2, 4)
        for scope in ("layer", "kv_head")
        for predicted in [(count == 2) == (scope == "kv_head")]
    ],
    indirect=["threads"],
)
def test_rows_together_have_the_bits_sets_and_counts_of_rows_alone(
    tmp_path, threads, scope, predicted
):
    found = []
    for joined in (True, False):
        rows = Rows(tmp_path / str(joined), scope=scope)
        outputs = [rows.step(number, joined, predicted) for number in range(1, 4)]
        tails = [one.tails[:, : one.lengths[0] % 64].copy() for one in rows.sequences]
        hits = [[counts.copy() for counts in one.hits.counts] for one in rows.sequences]
        counts = rows.counts(), rows.told()
        found.append((outputs, sorted(rows.sets), tails, hits, counts, rows.alone))
        rows.close()
    (outputs, sets, tails, hits, counts, alone), own = found
    assert alone == [0] * 3
    assert own[5] == [BATCH] * 3
    assert all(torch.equal(*pair) for pair in zip(outputs, own[0], strict=True))
    assert sets == own[1]
    assert len(sets) == 3 * LAYERS * BATCH
    assert all(np.array_equal(*pair) for pair in zip(tails, own[2], strict=True))
    assert all(
        np.array_equal(*pair)
        for both in zip(hits, own[3], strict=True)
        for pair in zip(*both, strict=True)
    )
    assert counts == own[4]
    # The twin: a bit of one row is seen.
    own[0][-1][1, 2, 3, 4].view(torch.int32).bitwise_xor_(1)
    assert not torch.equal(outputs[-1], own[0][-1])


def test_predicted_queries_choose_and_true_ones_attend(tmp_path):
    found = []
    for name, predicted in (("a", True), ("b", False)):
        rows = Rows(tmp_path / name)
        found.append((rows.step(1, True, predicted), sorted(rows.sets)))
        rows.close()
    (outputs, sets), (own, own_sets) = found
    assert torch.equal(outputs[0], own[0])
    assert not torch.equal(outputs[1], own[1])
    assert sets != own_sets


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_what_is_chosen_aside_is_there_before_rows_together_are_described(tmp_path, threads):
    """The newest token is coded, and another thread has chosen by then."""
    few = {"kept_sinks": 0, "kept_recent": 1, "exact": 0.001, "exact_floor": 2}
    found = []
    for name, budget, joined in (("few", Budget.LEAST, True), ("all", Budget.ALL_HOT, False)):
        rows = Rows(tmp_path / name, budget, **few)
        rows.pause = 0.02 if joined else 0
        found.append(([rows.step(number, joined) for number in range(1, 5)], sorted(rows.sets)))
        rows.close()
    (outputs, sets), own = found
    assert all(torch.equal(*pair) for pair in zip(outputs, own[0], strict=True))
    assert sets == own[1]
    own[0][-1][1, 2, 3, 4].view(torch.int32).bitwise_xor_(1)
    assert not torch.equal(outputs[-1], own[0][-1])


@pytest.mark.parametrize("budget", [Budget.SOME_HOT, Budget.LEAST])
@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "true"])
def test_rows_that_are_cold_change_no_bit(tmp_path, budget, predicted):
    found = []
    for name, given, joined in (("few", budget, True), ("all", Budget.ALL_HOT, False)):
        rows = Rows(tmp_path / name, given)
        outputs = [rows.step(number, joined, predicted) for number in range(1, 4)]
        found.append((outputs, sorted(rows.sets), rows.counts()))
        cold = rows.runtime.counters.cold_rows_read
        assert (cold > 0) == (name == "few")
        rows.close()
    (outputs, sets, counts), own = found
    assert all(torch.equal(*pair) for pair in zip(outputs, own[0], strict=True))
    assert (sets, counts) == own[1:]


@pytest.mark.parametrize(
    ("lengths", "alone"),
    [((1086, 900, 1160), 0), ((1087, 900, 1160), 1), ((1088, 900, 1160), 1), ((1087, 900, 960), 2)],
)
def test_rows_whose_group_begins_or_ends_go_by_themselves(tmp_path, lengths, alone):
    found = []
    for joined in (True, False):
        rows = Rows(tmp_path / str(joined), lengths=lengths)
        found.append(rows.step(1, joined))
        if joined:
            # One row alone is no batch.
            assert rows.alone == [BATCH if alone >= BATCH - 1 else alone]
        rows.close()
    assert torch.equal(*found)


def test_forks_go_by_themselves_until_their_segments_part(tmp_path):
    found = []
    for joined in (True, False):
        rows = Rows(tmp_path / str(joined))
        rows.sequences[1] = rows.runtime.fork(rows.sequences[0])
        outputs = [rows.step(number, joined) for number in range(1, 4)]
        found.append((torch.stack(outputs), sorted(rows.sets)))
        rows.close()
    (outputs, sets), own = found
    assert torch.equal(outputs, own[0])
    assert sets == own[1]


@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "true"])
def test_a_query_that_is_not_finite_is_told_of(tmp_path, predicted):
    rows = Rows(tmp_path / "rows")
    with pytest.raises(CacheUseError, match="layer 0 made a query that is not finite"):
        rows.step(1, True, predicted, spoil=1)
    rows.close()


def test_numbers_that_do_not_fit_are_counted_of_their_row(tmp_path):
    rows = Rows(tmp_path / "rows")
    rows.runtime.begin_step()
    assert rows.begin() == [0, 1, 2]
    keys, values = states(1, SHAPE.kv_heads, 1), states(2, SHAPE.kv_heads, 1)
    keys[1, 0, 0, 3], values[1, 1, 0, 5], values[2, 0, 0, 0] = 1e6, -1e6, 7e4
    rows.runtime.joined.store(0, keys, values)
    assert [one.counters.fp16_overflows for one in rows.sequences] == [0, 2, 1]
    assert rows.runtime.counters.fp16_overflows == 3
    assert not rows.runtime.joined.takes_numbers(keys.double(), values.double())
    assert not rows.runtime.joined.takes_numbers(keys.half(), values)
    rows.close()


def test_a_step_that_breaks_off_leaves_nothing_behind(tmp_path):
    rows = Rows(tmp_path / "rows")
    expected = rows.step(1, True)
    rows.close()
    rows = Rows(tmp_path / "again")
    rows.runtime.begin_step()
    taken = rows.begin()
    rows.announce(taken, 1, states(3, SHAPE.query_heads, 1))
    assert torch.equal(rows.step(1, True), expected)
    rows.close()
