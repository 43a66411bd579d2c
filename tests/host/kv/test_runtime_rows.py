# SPDX-License-Identifier: Apache-2.0
"""Rows of many sequences that grow, fork, shrink, are reordered and go, against lists of bytes.

Whatever happens, under every pool policy: each row is in the open group, hot or cold, hot rows are
what the drive has bit for bit, kept tokens stay hot, what is promoted takes the place of as much,
and M0 holds.
"""

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from runtime_rows import (
    SETTINGS,
    SHAPE,
    check_drive,
    check_hot,
    check_memory,
    check_slots,
    check_tails,
    fill,
    random_states,
    read,
    rows_of,
)

from hillinfer.drive.checksums import ROW_SUM_BYTES
from hillinfer.engine.budget_plan import hit_bytes, staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import ColdPoolError
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.kv.sequence import observed_bytes
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Part
from hillinfer.settings import PoolSizes

MOST_SEQUENCES = 4
MOST_TOKENS = 1024
# Slots with room for everything that may count as kept: each sequence's, and as much of forks that
# went and left their rows to others.
ROOMY = 2 * MOST_SEQUENCES * 10
CHOSEN = SETTINGS.changed(kept_sinks=2, kept_recent=8)
NUMBERS = st.integers(0, 10_000)


class RowsOfSequences(RuleBasedStateMachine):
    cold_dir = None

    @initialize(
        hot_rows=st.sampled_from([0, 5, 90, 1000]),
        policy=st.sampled_from(list(POOL_POLICIES)),
        sizes=st.sampled_from(PoolSizes),
    )
    def make_runtime(self, hot_rows, policy, sizes):
        each = 64 * SHAPE.token_bytes + hit_bytes(SHAPE, MOST_TOKENS) + observed_bytes(SHAPE, 16)
        # Slots and checksums of rows.
        tables = SHAPE.layers * (4 + ROW_SUM_BYTES) * TABLE_GROWTH_ROWS
        hot = hot_rows * SHAPE.layers * (SHAPE.row_bytes + SLOT_BYTES)
        budget = staging_bytes(SHAPE, CHOSEN) + MOST_SEQUENCES * each + tables + hot
        chosen = CHOSEN.changed(pool_policy=policy, pool_sizes=sizes)
        self.runtime = Runtime(SHAPE, chosen, budget, self.cold_dir)
        self.known = []
        self.seed = 0
        # Tokens that came or were copied into open groups, and groups filled for the first time
        # or once more after a rewind; `once_full` is how many groups each sequence ever had full.
        self.tokens = self.first_writes = self.rewrites = 0
        self.once_full = {}
        # Positions that were read and are kept, by sequence and layer.
        self.kept = {}

    def pick(self, number):
        return self.known[number % len(self.known)]

    def open_one(self):
        empty = np.zeros((0, SHAPE.row_bytes), np.uint8)
        sequence = self.runtime.open_sequence()
        self.known.append((sequence, [empty] * SHAPE.layers))
        self.once_full[id(sequence)] = 0

    def append_to(self, sequence, rows, tokens):
        before = len(rows[0])
        tokens = min(tokens, MOST_TOKENS - before)
        if not tokens:
            return
        self.seed += 1
        states = random_states(self.seed, tokens)
        for layer in range(SHAPE.layers):
            self.runtime.append(layer, sequence, states[0, layer], states[1, layer])
            if tokens == 1:
                # As after the attention of a single token.
                self.runtime.parts.rows.offer_filled(layer, sequence, self.runtime.step)
            rows[layer] = np.concatenate([rows[layer], rows_of(states, layer)])
            self.kept[id(sequence), layer] = {
                position
                for position in self.kept.get((id(sequence), layer), ())
                if position < CHOSEN.kept_sinks or position >= len(rows[0]) - CHOSEN.kept_recent
            }
        sequence.token_ids.extend([0] * tokens)
        full, once = len(rows[0]) // 64, self.once_full[id(sequence)]
        self.rewrites += max(0, min(full, once) - before // 64)
        self.first_writes += max(0, full - max(once, before // 64))
        self.once_full[id(sequence)] = max(full, once)
        self.tokens += tokens

    def fork_of(self, sequence, rows):
        written = self.runtime.counters.cold_write_bytes
        copy = self.runtime.fork(sequence)
        assert self.runtime.counters.cold_write_bytes == written
        self.once_full[id(copy)] = self.once_full[id(sequence)]
        self.tokens += len(rows[0]) % 64
        return copy, list(rows)

    def release_one(self, sequence):
        self.runtime.release(sequence)
        del self.once_full[id(sequence)]
        for layer in range(SHAPE.layers):
            self.kept.pop((id(sequence), layer), None)

    # --- what may happen -------------------------------------------------------------------

    @precondition(lambda self: len(self.known) < MOST_SEQUENCES)
    @rule()
    def open(self):
        self.open_one()

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS, tokens=st.sampled_from([1, 2, 30, 63, 64, 65, 128, 200]))
    def append(self, number, tokens):
        self.runtime.begin_step()
        self.append_to(*self.pick(number), tokens)

    @precondition(lambda self: 0 < len(self.known) < MOST_SEQUENCES)
    @rule(number=NUMBERS)
    def fork(self, number):
        self.known.append(self.fork_of(*self.pick(number)))

    @precondition(lambda self: self.known)
    @rule(chosen=st.lists(NUMBERS, min_size=1, max_size=MOST_SEQUENCES), tokens=st.integers(1, 40))
    def reorder_beams(self, chosen, tokens):
        """Rows of a batch that go on from others: some go, some part, then all grow."""
        beams = [self.pick(number) for number in chosen]
        for sequence, _ in self.known:
            if not any(sequence is kept for kept, _ in beams):
                self.release_one(sequence)
        self.known = []
        for sequence, rows in beams:
            taken = any(sequence is other for other, _ in self.known)
            self.known.append(self.fork_of(sequence, rows) if taken else (sequence, rows))
        self.runtime.begin_step()
        for sequence, rows in self.known:
            self.append_to(sequence, rows, tokens)

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS, cut=st.sampled_from([0, 1, 20, 64, 65, 150]))
    def truncate(self, number, cut):
        sequence, rows = self.pick(number)
        length = max(0, len(rows[0]) - cut)
        self.runtime.truncate(sequence, length)
        rows[:] = [one[:length] for one in rows]
        assert len(sequence.token_ids) == length
        for layer in range(SHAPE.layers):
            assert not sequence.hits.counts[layer][length:].any()
            kept = self.kept.get((id(sequence), layer), set())
            self.kept[id(sequence), layer] = {position for position in kept if position < length}

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS)
    def release(self, number):
        self.release_one(self.known.pop(number % len(self.known))[0])

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS, layer=st.integers(0, 1), seed=NUMBERS)
    def stream(self, number, layer, seed):
        sequence, rows = self.pick(number)
        positions = self.some_positions(rows, seed, kept=False)
        self.runtime.begin_step()
        found = [one.copy() for one in self.runtime.gather.stream(layer, sequence, positions)]
        assert all(0 < len(one) <= CHOSEN.block_rows for one in found)
        read_back = np.concatenate([rows[layer][:0], *found])
        np.testing.assert_array_equal(read_back, rows[layer][positions])

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS, layer=st.integers(0, 1), seed=NUMBERS)
    def select(self, number, layer, seed):
        sequence, rows = self.pick(number)
        positions = self.some_positions(rows, seed, kept=True)
        pools, counters = self.runtime.parts.pools, self.runtime.counters
        # A table that grows, and memory divided anew, may demote rows before the step does.
        pools.cover_hits(sequence.hits, layer, len(rows[layer]))
        pools.promotions.settle_all()
        pool = pools.layers[layer]
        self.runtime.begin_step()
        hot = len(pool.hot_rows)
        full = hot == pool.used_rows >= pools.capacity(layer)
        before = counters.promoted_rows, counters.demoted_rows
        fetched = list(self.runtime.gather.copied(layer, sequence, positions, self.runtime.step))
        pools.promotions.settle_all()
        promoted = counters.promoted_rows - before[0]
        demoted = counters.demoted_rows - before[1]
        assert promoted - demoted == len(pool.hot_rows) - hot
        assert promoted == demoted or not full
        blocks = [block for block, _ in fetched]
        np.testing.assert_array_equal(np.concatenate([positions[:0], *blocks]), positions)
        settled = positions[positions < sequence.tail_start(layer)]
        if len(settled) <= pools.capacity(layer) - ROOMY:
            length = len(rows[layer])
            kept = (positions < CHOSEN.kept_sinks) | (positions >= length - CHOSEN.kept_recent)
            self.kept[id(sequence), layer] = set(positions[kept].tolist())

    @precondition(lambda self: self.known)
    @rule(number=NUMBERS, layer=st.integers(0, 1), seed=NUMBERS)
    def select_and_compare(self, number, layer, seed):
        sequence, rows = self.pick(number)
        positions = self.some_positions(rows, seed, kept=True)
        for block, found in read(self.runtime, layer, sequence, positions):
            assert len(block) <= CHOSEN.block_rows
            np.testing.assert_array_equal(found, rows[layer][block])

    def some_positions(self, rows, seed, kept):
        chooser = np.random.default_rng(seed)
        length = len(rows[0])
        chosen = chooser.choice(length, chooser.integers(0, length + 1), replace=False)
        if chooser.integers(2):
            chosen = chosen[:30]
        ends = [np.arange(min(CHOSEN.kept_sinks, length))] if kept else []
        ends += [np.arange(max(0, length - CHOSEN.kept_recent), length)] if kept else []
        return np.unique(np.concatenate([chosen, *ends]).astype(np.int64))

    # --- what holds at any time ------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "runtime"))
    @invariant()
    def memory_holds_while_rows_move(self):
        check_memory(self.runtime, len(self.known))

    @precondition(lambda self: hasattr(self, "runtime"))
    @invariant()
    def every_row_is_in_its_pool(self):
        check_tails(self.known)
        check_slots(self.runtime, self.known)
        check_drive(self.runtime, self.known)

    @precondition(lambda self: hasattr(self, "runtime"))
    @invariant()
    def kept_tokens_stay_hot(self):
        self.runtime.parts.pools.promotions.settle_all()
        for layer in range(SHAPE.layers):
            if self.runtime.parts.pools.capacity(layer) < ROOMY:
                self.kept = {key: set() for key in self.kept}
            for sequence, _ in self.known:
                kept = self.kept.get((id(sequence), layer), set())
                # What several sequences share is kept by the length of the one that went on last.
                own = {
                    position
                    for position in kept
                    if position < CHOSEN.kept_sinks
                    or position >= sequence.tail_start(layer)
                    or sum(
                        sequence.groups[position // 64] in other.groups for other, _ in self.known
                    )
                    == 1
                }
                self.kept[id(sequence), layer] = own
                check_hot(self.runtime, layer, sequence, own)

    @precondition(lambda self: hasattr(self, "runtime"))
    @invariant()
    def rows_are_written_once(self):
        group_bytes = 64 * SHAPE.row_bytes
        written = self.runtime.counters.cold_write_bytes
        assert written == (self.first_writes + self.rewrites) * SHAPE.layers * group_bytes
        assert self.first_writes * 64 <= self.tokens

    @precondition(lambda self: hasattr(self, "runtime"))
    @invariant()
    def kv_bytes_count_every_row_once(self):
        groups = {group for sequence, _ in self.known for group in sequence.groups}
        open_rows = sum(len(rows[0]) % 64 for _, rows in self.known)
        expected = (len(groups) * 64 + open_rows) * SHAPE.token_bytes
        assert self.runtime.statistics().kv_bytes == expected

    def teardown(self):
        if hasattr(self, "runtime"):
            self.runtime.close()


def test_rows_of_many_sequences(cold_dir):
    class Here(RowsOfSequences):
        pass

    Here.cold_dir = cold_dir
    chosen = settings(max_examples=20, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Here, settings=chosen)


# --- mutation twins ------------------------------------------------------------------------


@pytest.fixture
def half_hot(cold_dir):
    """A runtime with a sequence of 200 tokens, some of them hot, and what is known of it."""
    sums = SHAPE.layers * ROW_SUM_BYTES * TABLE_GROWTH_ROWS
    runtime = Runtime(
        SHAPE,
        CHOSEN,
        staging_bytes(SHAPE, CHOSEN) + (60 << 10) + sums,
        cold_dir,
    )
    sequence = runtime.open_sequence()
    states = fill(runtime, sequence, 200)
    known = [(sequence, [rows_of(states, layer) for layer in range(SHAPE.layers)])]
    for layer in range(SHAPE.layers):
        read(runtime, layer, sequence, np.arange(50, 90))
    check_everything(runtime, known)
    yield runtime, known
    runtime.close()


def check_everything(runtime, known):
    check_memory(runtime, len(known))
    check_tails(known)
    check_slots(runtime, known)
    check_drive(runtime, known)
    check_hot(runtime, 1, known[0][0], range(60, 64))


def slot_of(runtime, known, position):
    slot = int(runtime.parts.pools.layers[1].slots(known[0][0].rows(np.array([position])))[0])
    assert slot >= 0
    return slot


def flip_in_slot(runtime, known):
    runtime.parts.pools.layers[1].columns.data[slot_of(runtime, known, 70), 0] ^= 1


def flip_in_tail(runtime, known):
    known[0][0].tails[1, 3, 0] ^= 1


def flip_in_file(runtime, known):
    runtime.parts.store.settle(1, np.arange(10))
    # A second, buffered descriptor, because direct I/O moves whole pages.
    descriptor = os.open(f"/proc/self/fd/{runtime.parts.store.files[1].descriptor}", os.O_RDWR)
    offset = 70 * SHAPE.row_bytes
    byte = os.pread(descriptor, 1, offset)[0]
    os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    os.fsync(descriptor)
    os.close(descriptor)


def leave_a_slot_uncounted(runtime, known):
    runtime.parts.accountant.give(Part.HOT, SHAPE.row_bytes + SLOT_BYTES)


def use_a_slot_twice(runtime, known):
    pool, number = runtime.parts.pools.layers[1], known[0][0].rows(np.array([71]))
    pool.slot_of_row[number] = slot_of(runtime, known, 70)


def own_a_row_twice(runtime, known):
    slots = runtime.parts.pools.layers[1].columns
    slots.rows[slot_of(runtime, known, 71)] = slots.rows[slot_of(runtime, known, 70)]


def lose_a_kept_row(runtime, known):
    number = int(known[0][0].rows(np.array([62]))[0])
    runtime.parts.pools.layers[1].forget(number, number + 1)


def hold_a_row_of_nobody(runtime, known):
    # The group is still hot when the sequence has already given it back.
    known[0][0].set_length(1, 127, 64)
    known[0][1][1] = known[0][1][1][:127]
    known[0][0].tails[1, :63] = known[0][1][1][64:]


@pytest.mark.parametrize(
    "disturb",
    [
        flip_in_slot,
        flip_in_tail,
        flip_in_file,
        leave_a_slot_uncounted,
        use_a_slot_twice,
        own_a_row_twice,
        lose_a_kept_row,
        hold_a_row_of_nobody,
    ],
)
def test_the_checks_notice(disturb, half_hot):
    runtime, known = half_hot
    disturb(runtime, known)
    # Of a flip in the file the store itself knows.
    with pytest.raises((AssertionError, ColdPoolError)):
        check_everything(runtime, known)
