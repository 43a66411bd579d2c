# SPDX-License-Identifier: Apache-2.0
"""Single points of a runtime's rows: buffers, groups, streams, budgets and errors."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from broken_policy import BrokenPolicy
from runtime_rows import (
    SETTINGS,
    SHAPE,
    check_drive,
    check_memory,
    check_slots,
    check_tails,
    fill,
    random_states,
    read,
    rows_of,
)

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.checksums import ROW_SUM_BYTES
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec, score_bytes, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pool import SLOT_BYTES, PoolMoment
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Part


@pytest.fixture
def runtime(cold_dir):
    made = Runtime(SHAPE, SETTINGS, staging_bytes(SHAPE, SETTINGS) + (1 << 20), cold_dir)
    yield made
    made.close()


def test_full_groups_are_written_once_and_open_ones_not_at_all(runtime):
    sequence = runtime.open_sequence()
    group_bytes = 64 * SHAPE.row_bytes
    for tokens, groups in ((63, 0), (1, 1), (1, 1), (127, 3), (200, 6)):
        fill(runtime, sequence, tokens)
        assert runtime.counters.cold_write_bytes == groups * SHAPE.layers * group_bytes
    for layer in range(SHAPE.layers):
        list(runtime.gather.stream(layer, sequence, np.arange(392)))
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
    assert runtime.parts.groups.groups == 3


class SlowReads(DriveCalls):
    """A drive that takes its time while it is slow."""

    def __init__(self):
        self.is_slow, self.begun = False, threading.Event()

    def _wait(self):
        if self.is_slow:
            self.begun.set()
            time.sleep(0.1)

    def preadv(self, descriptor, into, offset):
        self._wait()
        return super().preadv(descriptor, into, offset)

    def land(self, *given):
        self._wait()
        return super().land(*given)


def test_a_stream_that_was_left_in_the_middle_disturbs_no_later_one(cold_dir):
    calls, budget = SlowReads(), staging_bytes(SHAPE, SETTINGS) + (1 << 20)
    runtime = Runtime(SHAPE, SETTINGS.changed(io="threads"), budget, cold_dir, calls=calls)
    sequence = runtime.open_sequence()
    rows = rows_of(fill(runtime, sequence, 500), 0)
    positions = np.arange(500)
    runtime.parts.pools.promotions.settle_all()
    for group in sequence.groups:
        runtime.parts.pools.forget_group(group)
    abandoned = runtime.gather.stream(0, sequence, positions)
    next(abandoned)
    calls.is_slow = True
    # The third block goes where the first one of the next stream goes.
    next(abandoned)
    assert calls.begun.wait(30)
    calls.is_slow = False
    found = []
    for block in runtime.gather.stream(0, sequence, positions):
        time.sleep(0 if found else 0.2)
        found.append(block.copy())
    np.testing.assert_array_equal(np.concatenate(found), rows)
    abandoned.close()
    runtime.close()


@pytest.fixture
def breakable(runtime):
    """A policy that the runtime's pools rank by."""
    policy = BrokenPolicy()
    for pool in runtime.parts.pools.layers:
        pool.policy = policy
    return policy


def test_errors_while_rows_are_taken_in_use_no_buffer_up(runtime, breakable):
    """There are two write-back buffers; a third error must not wait for one for ever."""
    sequence = runtime.open_sequence()

    def take_in():
        fill(runtime, sequence, 70)
        # As attention does.
        runtime.parts.pools.promotions.settle_all()

    def fail_three_times():
        for _ in range(3):
            breakable.failures = 1
            with pytest.raises(ZeroDivisionError):
                take_in()
            runtime.truncate(sequence, 0)

    attempt = threading.Thread(target=fail_three_times, daemon=True)
    attempt.start()
    attempt.join(120)
    assert not attempt.is_alive(), "waits for a buffer that never comes"
    assert breakable.failures == 0
    states = fill(runtime, sequence, 70)
    check_rows(runtime, [(sequence, [rows_of(states, layer) for layer in range(SHAPE.layers)])])


def check_rows(runtime, known):
    check_memory(runtime, len(known))
    check_tails(known)
    check_slots(runtime, known)
    check_drive(runtime, known)


def cold_rows(runtime, known):
    """Make every row cold."""
    for group in known[0][0].groups:
        runtime.parts.pools.forget_group(group)


def fail_in_the_background(runtime, breakable, known):
    cold_rows(runtime, known)
    breakable.failures = 1
    read(runtime, 0, known[0][0], np.arange(5, 25))


@pytest.fixture
def two(runtime):
    """Two sequences, the second a fork of the first, and their rows."""
    sequence = runtime.open_sequence()
    states = fill(runtime, sequence, 200)
    rows = [rows_of(states, layer) for layer in range(SHAPE.layers)]
    return [(sequence, rows), (runtime.fork(sequence), list(rows))]


@pytest.mark.parametrize(
    "use",
    [
        lambda runtime, sequence: read(runtime, 0, sequence, np.arange(5, 25)),
        lambda runtime, sequence: list(runtime.gather.stream(0, sequence, np.arange(10))),
        lambda runtime, sequence: fill(runtime, sequence, 64),
    ],
    ids=["step", "stream", "append"],
)
def test_an_error_in_the_background_surfaces_at_the_next_use(runtime, breakable, two, use):
    fail_in_the_background(runtime, breakable, two)
    sequence = two[0][0]
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        use(runtime, sequence)
    runtime.truncate(sequence, 190)
    two[0] = (sequence, [rows[:190] for rows in two[0][1]])
    check_rows(runtime, two)
    for layer in range(SHAPE.layers):
        for block, rows in read(runtime, layer, sequence, np.arange(190)):
            np.testing.assert_array_equal(rows, two[0][1][layer][block])
    check_rows(runtime, two)


def test_an_error_in_the_background_does_not_stop_a_release_half_way(runtime, breakable, two):
    """Groups are given back whole, and whoever comes next is told of the error."""
    fill(runtime, two[1][0], 130, seed=2)
    assert runtime.parts.groups.parts_in_use == 5
    fail_in_the_background(runtime, breakable, two)
    runtime.release(two.pop()[0])
    assert runtime.parts.groups.parts_in_use == 3
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        read(runtime, 1, two[0][0], np.arange(5))
    check_rows(runtime, two)


def test_an_error_in_the_background_stops_a_truncate_before_anything_changes(
    runtime, breakable, two
):
    fail_in_the_background(runtime, breakable, two)
    sequence, rows = two[1]
    with pytest.raises(ZeroDivisionError, match="a broken policy"):
        runtime.truncate(sequence, 100)
    check_rows(runtime, two)
    runtime.truncate(sequence, 100)
    two[1] = (sequence, [one[:100] for one in rows])
    check_rows(runtime, two)


def test_a_fork_that_does_not_fit_leaves_nothing_behind(runtime, two):
    sequence = two[0][0]
    for layer in range(SHAPE.layers):
        runtime.parts.manager.tally(layer, sequence, np.arange(3))
    accountant = runtime.parts.accountant
    # Rows that are still on their way into a pool would come while it shrinks.
    runtime.parts.pools.promotions.settle_all()
    for pool in runtime.parts.pools.layers:
        pool.shrink(0, PoolMoment(1, 200, 0.1, 4, 32))
    runtime.parts.pools.redistribute(np.zeros(SHAPE.layers, np.int64))
    held = accountant.held()
    before = len(runtime.parts.rows.sequences), runtime.parts.groups.parts_in_use
    # The table of hits fits, then the open group does not; and the other way round nothing does.
    for spare in (sequence.hits.byte_count, 100):
        rest = accountant.spare_bytes - spare
        accountant.take(Part.STAGING, rest)
        with pytest.raises(BudgetError):
            runtime.fork(sequence)
        assert (len(runtime.parts.rows.sequences), runtime.parts.groups.parts_in_use) == before
        assert accountant.held()[Part.OTHER] == held[Part.OTHER]
        assert runtime.parts.pools.tails_bytes == 2 * 64 * SHAPE.token_bytes
        accountant.give(Part.STAGING, rest)
    for sequence, _ in two:
        runtime.release(sequence)
    assert runtime.parts.groups.parts_in_use == 0, "no group is owned by a fork that failed"


def test_observed_queries_are_forgotten_only_where_tokens_are(cold_dir):
    chosen = SETTINGS.changed(pool_policy="paper", kept_recent=4)
    runtime = Runtime(SHAPE, chosen, staging_bytes(SHAPE, chosen) + (1 << 20), cold_dir)
    sequence = runtime.open_sequence()
    states = random_states(1, 100)
    for layer in range(SHAPE.layers):
        keys, values = states[:, layer]
        runtime.append(layer, sequence, keys, values)
        runtime.attend_dense(layer, sequence, torch.randn(4, 100, 6), keys, values, 0.4)
    fork = runtime.fork(sequence)
    runtime.truncate(sequence, 100)
    assert [one.shape for one in sequence.observed] == [(16, 4, 6)] * SHAPE.layers
    runtime.truncate(sequence, 99)
    assert sequence.observed == [None] * SHAPE.layers
    new = random_states(2, 1)
    runtime.begin_step()
    runtime.append(0, fork, new[0, 0], new[1, 0])
    runtime.attend_selected(0, fork, torch.randn(4, 1, 6), new[0, 0], 0.4)
    # Sixteen observed queries and this step's own selected the kept tokens, and others now and
    # then; they are counted once.
    assert fork.observed[0] is None
    assert fork.hits.counts[0][0] == 17
    assert 0 < fork.hits.counts[0][20:90].astype(int).sum() <= 17 * 14
    assert not fork.hits.counts[1].any()
    runtime.begin_step()
    runtime.append(0, fork, new[0, 0], new[1, 0])
    runtime.attend_selected(0, fork, torch.randn(4, 1, 6), new[0, 0], 0.4)
    assert fork.hits.counts[0][0] == 18
    runtime.close()


def test_nothing_to_read_is_no_block(runtime):
    sequence = runtime.open_sequence()
    assert list(runtime.gather.stream(0, sequence, np.arange(0))) == []


def test_the_newest_rows_stay_hot_when_not_all_can(cold_dir):
    hot = 10
    tables = (4 + ROW_SUM_BYTES) * TABLE_GROWTH_ROWS + 2 * 1024
    budget = (
        staging_bytes(SHAPE, SETTINGS)
        + 64 * SHAPE.token_bytes
        + SHAPE.layers * (tables + hot * (SHAPE.row_bytes + SLOT_BYTES))
    )
    runtime = Runtime(SHAPE, SETTINGS, budget, cold_dir)
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 200)
    slots = runtime.parts.pools.layers[0].slots(sequence.rows(np.arange(192)))
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


def all_of(accountant):
    """Take what a budget has left, rows that can be read again too; return how much that was."""
    size, taken = accountant.budget_bytes, 0
    while size:
        try:
            accountant.take(Part.OTHER, size)
        except BudgetError:
            size //= 2
        else:
            taken += size
    return taken


def test_a_truncate_that_fails_changes_nothing(runtime):
    """A shared segment that is cut is copied, and there is no room for the copy."""
    sequence = runtime.open_sequence()
    states = fill(runtime, sequence, 1100)
    for layer in range(SHAPE.layers):
        runtime.code_full_segments(layer, sequence, states[0, layer])
    fork = runtime.fork(sequence)
    before = (list(sequence.lengths), sequence.groups, sequence.tails.copy())
    accountant = runtime.parts.accountant
    taken = all_of(accountant)
    # For rows that are read back, which come first and must not be written yet, and what says
    # where they lie.
    rows = 40 * SHAPE.token_bytes + (1 << 12)
    accountant.give(Part.OTHER, rows)
    with pytest.raises(BudgetError, match="more for shadow"):
        runtime.truncate(sequence, 1000)
    assert (list(sequence.lengths), sequence.groups) == before[:2]
    assert (sequence.tails == before[2]).all()
    accountant.give(Part.OTHER, taken - rows)
    runtime.truncate(sequence, 1000)
    assert list(sequence.lengths) == [1000] * len(sequence.lengths)
    assert list(fork.lengths) == before[0]


def test_rows_that_a_truncate_reads_back_count(runtime):
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 190)
    before = runtime.statistics()
    runtime.truncate(sequence, 127)
    after = runtime.statistics()
    reread = 63 * SHAPE.token_bytes
    assert after.staging_bytes - before.staging_bytes == reread
    assert after.dram_peak_bytes - before.dram_peak_bytes == reread
    assert after.dram_peak_bytes <= after.dram_budget_bytes


def test_scores_of_a_step_count(runtime):
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 1500)
    before = runtime.statistics()
    new = random_states(2, 1)
    runtime.append(0, sequence, new[0, 0], new[1, 0])
    runtime.attend_selected(0, sequence, torch.randn(4, 1, 6), new[0, 0], 0.4)
    after = runtime.statistics()
    scores = score_bytes(kernel_spec(SHAPE, SETTINGS), SETTINGS.scope, 1501)
    # The statistics of two segments are a few hundred bytes.
    assert scores > 4000
    assert scores <= after.other_bytes - before.other_bytes < scores + 2000


@pytest.mark.parametrize("policy", ["paper", "decayed"])
def test_as_many_sequences_fit_after_others_came_and_went(policy, cold_dir):
    chosen = SETTINGS.changed(pool_policy=policy)
    budget = staging_bytes(SHAPE, chosen) + (100 << 10)

    def most(runtime):
        for opened in range(1000):
            try:
                runtime.open_sequence()
            except BudgetError:
                return opened
        raise AssertionError("the budget refuses nothing")

    fresh, used = (Runtime(SHAPE, chosen, budget, cold_dir) for _ in range(2))
    for _ in range(5):
        sequence = used.open_sequence()
        used.release(used.fork(sequence))
        used.release(sequence)
    assert most(used) == most(fresh) > 3
    fresh.close()
    used.close()


def test_a_fork_counts_its_own_hits(runtime):
    sequence = runtime.open_sequence()
    fill(runtime, sequence, 200)
    for layer in range(SHAPE.layers):
        read(runtime, layer, sequence, np.arange(100, 130))
    fork = runtime.fork(sequence)
    before = [counts.copy() for counts in sequence.hits.counts]
    for own, counts in zip(fork.hits.counts, before, strict=True):
        np.testing.assert_array_equal(own, counts)
    for layer in range(SHAPE.layers):
        read(runtime, layer, fork, np.arange(20, 60))
    for layer, counts in enumerate(before):
        np.testing.assert_array_equal(sequence.hits.counts[layer], counts)
        assert not counts[20:60].any()
        assert fork.hits.counts[layer][20:60].all()


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
