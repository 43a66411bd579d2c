# SPDX-License-Identifier: Apache-2.0
"""Rows of many sequences that grow, fork, shrink and go, against plain lists of bytes.

Whatever happens, every row of every sequence reads back bit by bit, hot rows are what the drive
has, and M0 holds.
"""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hillinfer.errors import BudgetError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.pools.accountant import Part
from hillinfer.pools.budget_plan import BudgetPlan, staging_bytes
from hillinfer.pools.slot_table import SLOT_BYTES
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings

SHAPE = ModelShape(
    layers=2,
    kv_heads=2,
    query_heads=4,
    head_dim=6,
    stored_type=StoredType.FLOAT16,
    max_positions=100_000,
)
SETTINGS = Settings().changed(block_rows=40, io_threads=2)
MOST_SEQUENCES = 4
NUMBERS = st.integers(0, 10_000)


def random_states(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SHAPE.layers, SHAPE.kv_heads, tokens, 6, generator=generator).half()


def rows_of(states, layer):
    """Return rows as the layout is specified: K of all heads, V of all heads, zeros up to 64."""
    tokens = states.shape[3]
    keys, values = states[:, layer].transpose(1, 2).reshape(2, tokens, -1)
    packed = torch.cat([keys, values], dim=1).view(torch.int16).numpy().view(np.uint8)
    return np.pad(packed, ((0, 0), (0, SHAPE.row_bytes - packed.shape[1])))


class RowsOfSequences(RuleBasedStateMachine):
    cold_dir = None

    @initialize(hot_rows=st.sampled_from([0, 5, 70, 1000]))
    def make_runtime(self, hot_rows):
        tails = MOST_SEQUENCES * 64 * SHAPE.token_bytes
        tables = SHAPE.layers * 4 * 4096
        hot = hot_rows * SHAPE.layers * (SHAPE.row_bytes + SLOT_BYTES)
        budget = staging_bytes(SHAPE, SETTINGS) + tails + tables + hot
        self.runtime = Runtime(SHAPE, SETTINGS, budget, self.cold_dir)
        self.sequences = []
        self.seed = 0

    def pick(self, number):
        return self.sequences[number % len(self.sequences)]

    @precondition(lambda self: len(self.sequences) < MOST_SEQUENCES)
    @rule()
    def open(self):
        empty = np.zeros((0, SHAPE.row_bytes), np.uint8)
        self.sequences.append((self.runtime.open_sequence(), [empty] * SHAPE.layers))

    @precondition(lambda self: self.sequences)
    @rule(number=NUMBERS, tokens=st.sampled_from([1, 2, 30, 63, 64, 65, 128, 200]))
    def append(self, number, tokens):
        sequence, rows = self.pick(number)
        self.seed += 1
        states = random_states(self.seed, tokens)
        self.runtime.begin_step()
        for layer in range(SHAPE.layers):
            self.runtime.append(layer, sequence, states[0, layer], states[1, layer])
            rows[layer] = np.concatenate([rows[layer], rows_of(states, layer)])
        sequence.token_ids.extend([0] * tokens)

    @precondition(lambda self: 0 < len(self.sequences) < MOST_SEQUENCES)
    @rule(number=NUMBERS)
    def fork(self, number):
        sequence, rows = self.pick(number)
        written = self.runtime.counters.cold_write_bytes
        self.sequences.append((self.runtime.fork(sequence), list(rows)))
        assert self.runtime.counters.cold_write_bytes == written

    @precondition(lambda self: self.sequences)
    @rule(number=NUMBERS, cut=st.sampled_from([0, 1, 20, 64, 65, 150]))
    def truncate(self, number, cut):
        sequence, rows = self.pick(number)
        length = max(0, len(rows[0]) - cut)
        self.runtime.truncate(sequence, length)
        rows[:] = [one[:length] for one in rows]
        assert len(sequence.token_ids) == length

    @precondition(lambda self: self.sequences)
    @rule(number=NUMBERS)
    def release(self, number):
        sequence, _ = self.sequences.pop(number % len(self.sequences))
        self.runtime.release(sequence)

    @precondition(lambda self: self.sequences)
    @rule(number=NUMBERS, layer=st.integers(0, 1), seed=NUMBERS, promote=st.booleans())
    def read(self, number, layer, seed, promote):
        sequence, rows = self.pick(number)
        chooser = np.random.default_rng(seed)
        length = len(rows[layer])
        count = chooser.integers(0, length + 1)
        positions = np.sort(chooser.choice(length, count, replace=False)).astype(np.int64)
        self.runtime.begin_step()
        reader = self.runtime._reader
        if promote:
            blocks = [
                (block.copy(), found.copy())
                for block, found in reader.fetch(layer, sequence, positions, self.runtime._step)
            ]
        else:
            found = [found.copy() for found in reader.stream(layer, sequence, positions)]
            starts = np.cumsum([0, *map(len, found)])
            blocks = [
                (positions[start : start + len(one)], one)
                for start, one in zip(starts, found, strict=False)
            ]
        read = np.concatenate([block for block, _ in blocks]) if blocks else positions[:0]
        np.testing.assert_array_equal(read, positions)
        for block, found in blocks:
            assert len(block) <= SETTINGS.block_rows
            np.testing.assert_array_equal(found, rows[layer][block])

    @invariant()
    def budget_holds(self):
        if not hasattr(self, "runtime"):
            return
        accountant = self.runtime._accountant
        held = accountant.held()
        assert sum(held.values()) <= accountant.budget_bytes
        assert sum(accountant.peak().values()) <= accountant.budget_bytes
        pools = self.runtime._pools.layers
        slots = sum(pool.used_rows for pool in pools) * (SHAPE.row_bytes + SLOT_BYTES)
        tails = len(self.sequences) * 64 * SHAPE.token_bytes
        assert held[Part.HOT] == slots + tails

    @invariant()
    def hot_rows_are_copies(self):
        if not hasattr(self, "runtime"):
            return
        for layer, pool in enumerate(self.runtime._pools.layers):
            used = pool._row_of_slot[: pool.used_rows]
            hot = used[used >= 0]
            assert len(set(hot.tolist())) == len(hot)
            np.testing.assert_array_equal(pool.slots(hot), np.flatnonzero(used >= 0))
            assert (pool._slot_of_row >= 0).sum() == len(hot)
            known = set()
            for sequence, rows in self.sequences:
                full = len(rows[layer]) // 64 * 64
                if not full:
                    continue
                numbers = sequence.rows(np.arange(full))
                known |= set(numbers.tolist())
                slots = pool.slots(numbers)
                np.testing.assert_array_equal(
                    pool._rows[slots[slots >= 0]], rows[layer][:full][slots >= 0]
                )
            assert set(hot.tolist()) <= known, "rows of groups that nobody owns are forgotten"

    @invariant()
    def kv_bytes_count_every_row_once(self):
        if not hasattr(self, "runtime"):
            return
        groups = {group for sequence, _ in self.sequences for group in sequence.groups}
        open_rows = sum(len(rows[0]) % 64 for _, rows in self.sequences)
        expected = (len(groups) * 64 + open_rows) * SHAPE.token_bytes
        assert self.runtime.statistics().kv_bytes == expected

    def teardown(self):
        if hasattr(self, "runtime"):
            self.runtime.close()


def test_rows_of_many_sequences(cold_dir):
    class Here(RowsOfSequences):
        pass

    Here.cold_dir = cold_dir
    Here.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
    Here.TestCase("runTest").runTest()


# --- single points -------------------------------------------------------------------------


@pytest.fixture
def runtime(cold_dir):
    made = Runtime(SHAPE, SETTINGS, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir)
    yield made
    made.close()


def fill(runtime, sequence, tokens, seed=1):
    states = random_states(seed, tokens)
    for layer in range(SHAPE.layers):
        runtime.append(layer, sequence, states[0, layer], states[1, layer])
    return states


def test_full_groups_are_written_once_and_open_ones_not_at_all(runtime):
    sequence = runtime.open_sequence()
    group_bytes = 64 * SHAPE.row_bytes
    for tokens, groups in ((63, 0), (1, 1), (1, 1), (127, 3), (200, 6)):
        fill(runtime, sequence, tokens)
        assert runtime.counters.cold_write_bytes == groups * SHAPE.layers * group_bytes
    for layer in range(SHAPE.layers):
        list(runtime._reader.stream(layer, sequence, np.arange(392)))
    assert runtime.counters.cold_write_bytes == 6 * SHAPE.layers * group_bytes


def test_a_group_that_is_free_again_is_used_again(runtime):
    first = runtime.open_sequence()
    fill(runtime, first, 200)
    assert first.groups == [0, 1, 2]
    second = runtime.fork(first)
    runtime.truncate(first, 100)
    assert second.groups == [0, 1, 2]
    runtime.release(second)
    fill(runtime, first, 100)
    assert first.groups == [0, 1, 2]
    assert runtime._groups.groups == 3


def test_a_stream_that_was_left_in_the_middle_disturbs_no_later_one(runtime):
    sequence = runtime.open_sequence()
    rows = rows_of(fill(runtime, sequence, 500), 0)
    positions = np.arange(500)
    gather = runtime._reader._gather

    def slow_gather(layer, sequence, block, out):
        time.sleep(0.1 if block[0] == 2 * SETTINGS.block_rows else 0)
        return gather(layer, sequence, block, out)

    abandoned = runtime._reader.stream(0, sequence, positions)
    next(abandoned)
    runtime._reader._gather = slow_gather
    # The third block goes where the first one of the next stream goes.
    next(abandoned)
    runtime._reader._gather = gather
    found = []
    for block in runtime._reader.stream(0, sequence, positions):
        time.sleep(0 if found else 0.2)
        found.append(block.copy())
    np.testing.assert_array_equal(np.concatenate(found), rows)
    abandoned.close()


def test_errors_while_rows_are_taken_in_use_no_buffer_up(runtime, monkeypatch):
    """There are two spill buffers; a third error must not wait for one for ever."""
    sequence = runtime.open_sequence()
    admit = runtime._pools.admit

    def raises(*_):
        raise ZeroDivisionError

    def fail_three_times():
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                fill(runtime, sequence, 70)
            runtime.truncate(sequence, 0)

    monkeypatch.setattr(runtime._pools, "admit", raises)
    attempt = threading.Thread(target=fail_three_times, daemon=True)
    attempt.start()
    attempt.join(20)
    assert not attempt.is_alive(), "waits for a buffer that never comes"
    monkeypatch.setattr(runtime._pools, "admit", admit)
    rows = rows_of(fill(runtime, sequence, 70), 0)
    found = [block.copy() for block in runtime._reader.stream(0, sequence, np.arange(70))]
    np.testing.assert_array_equal(np.concatenate(found), rows)


def test_nothing_to_read_is_no_block(runtime):
    sequence = runtime.open_sequence()
    assert list(runtime._reader.stream(0, sequence, np.arange(0))) == []


def test_the_newest_rows_stay_hot_when_not_all_can(cold_dir):
    hot = 10
    budget = (
        staging_bytes(SHAPE, SETTINGS)
        + 64 * SHAPE.token_bytes
        + SHAPE.layers * (4 * 4096 + hot * (SHAPE.row_bytes + SLOT_BYTES))
    )
    runtime = Runtime(SHAPE, SETTINGS, budget, cold_dir)
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 200)
    slots = runtime._pools.layers[0].slots(sequence.rows(np.arange(192)))
    assert np.flatnonzero(slots >= 0).tolist() == list(range(182, 192))
    runtime.close()


def test_a_budget_below_the_buffers_is_refused_with_its_parts(cold_dir):
    with pytest.raises(BudgetError, match=r"staging .*raise --dram-budget"):
        Runtime(SHAPE, SETTINGS, 1000, cold_dir)


def test_closing_twice_is_harmless(runtime):
    runtime.close()
    runtime.close()


@pytest.mark.parametrize("tokens", [5, 64, 300, 1030])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("device", ["nvme", "golden"])
def test_what_the_plan_requires_is_enough(tokens, sequences, device, cold_dir):
    """Prefill, decode and forks at exactly the bytes that the plan calls the least."""
    chosen = SETTINGS.changed(device=device, alpha=0.3, kept_recent=4, block_tokens=50)
    plan = BudgetPlan.for_context(SHAPE, chosen, tokens, sequences)
    runtime = Runtime(SHAPE, chosen, plan.required_bytes, cold_dir)
    for number in range(sequences):
        sequence = runtime.open_sequence()
        states = random_states(number, tokens)
        query = torch.randn(4, tokens, 6)
        cuts = [0, max(0, tokens - 3), *range(max(1, tokens - 2), tokens + 1)]
        for start, stop in pairwise(cuts):
            if start == stop:
                continue
            runtime.begin_step()
            for layer in range(SHAPE.layers):
                keys, values = states[:, layer, :, start:stop]
                runtime.append(layer, sequence, keys, values)
                if stop - start > 1:
                    runtime.attend_dense(layer, sequence, query[:, start:stop], keys, values, 0.4)
                else:
                    runtime.attend_selected(layer, sequence, query[:, start:stop], keys, 0.4)
    statistics = runtime.statistics()
    assert statistics.dram_peak_bytes <= plan.required_bytes
    parts = (
        statistics.hot_bytes
        + statistics.shadow_bytes
        + statistics.staging_bytes
        + statistics.other_bytes
    )
    assert parts == statistics.dram_peak_bytes
    runtime.close()


def test_a_truncate_that_fails_changes_nothing(runtime, monkeypatch):
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 150)
    before = (list(sequence.lengths), list(sequence.groups), sequence.tails.copy())

    def raises(*_):
        raise BudgetError("no room for a copy")

    monkeypatch.setattr(runtime._shadow, "truncate", raises)
    with pytest.raises(BudgetError, match="no room"):
        runtime.truncate(sequence, 100)
    assert (sequence.lengths, sequence.groups) == before[:2]
    assert (sequence.tails == before[2]).all()
    monkeypatch.undo()
    runtime.truncate(sequence, 100)
    assert sequence.lengths == [100] * len(sequence.lengths)


def test_statistics_wait_until_something_is_scored(runtime):
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 10)
    kept = runtime.settings.kept_tokens
    for length in range(11, kept + 4):
        new = random_states(length, 1)
        for layer in range(SHAPE.layers):
            runtime.append(layer, sequence, new[0, layer], new[1, layer])
            query = torch.randn(SHAPE.query_heads, 1, SHAPE.head_dim)
            runtime.attend_selected(layer, sequence, query, new[0, layer], 0.4)
        # All of kept + 1 tokens are selected, so the first score is made one token later.
        assert bool(sequence.segments) == (length > kept + 1), length
