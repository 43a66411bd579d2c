# SPDX-License-Identifier: Apache-2.0
"""Attention over rows that are all in memory, found and attended to in one call."""

import ctypes
import threading

import numpy as np
import pytest
import torch
from exact_attention import random_states
from native_cases import Rows, every_variant, native_attention, same_bits, shape_of, tell
from placement_matrix import Budget
from twins.python_decode import PythonDecode

from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.runtime import Runtime
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pool import HotPool
from hillinfer.kv.pool_policies import DecayedCounts, PoolPolicy
from hillinfer.kv.sequence import Sequence
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import native_library
from hillinfer.native.selected import MissList, SelectedRows
from hillinfer.native.structures import DecodeStep, Shape, row_addresses
from hillinfer.settings import Settings

SHAPE = ModelShape(1, 2, 4, 8, StoredType.FLOAT16, 10_000)
TOKENS = 300


class Scene:
    """All of some rows in slots, but for those that are told to be on the drive."""

    def __init__(self, rows, count, cold=()):
        groups, row_bytes = -(-count // 64), rows.memory.shape[1]
        self.positions = np.arange(count)
        self.pool = HotPool(row_bytes, len(rows.memory), PoolPolicy())
        self.pool.cover(64 * groups)
        self.pool.grow(len(rows.memory))
        self.pool.slot_of_row[:count] = rows.places
        self.pool.slot_of_row[list(cold)] = -1
        self.memory = self.pool.columns.data
        self.sequence = Sequence(1, row_bytes)
        self.sequence.append_groups(range(groups))
        self.sequence.set_length(0, 64 * groups, 64 * groups)
        self.sets = [self.positions]
        self.misses = MissList(count)
        self.expected = row_addresses(self.memory, rows.places)

    def attend(self, variant, rows, scaling, fade_shift=-1):
        """Return what the library makes of the sets, or None, and their rows' addresses."""
        shape, query = rows.shape, rows.query.float().contiguous()
        asked = DecodeStep(
            shape=Shape(kv_heads=shape.kv_heads, head_dim=shape.head_dim),
            query=query.data_ptr(),
            head_stride=shape.head_dim,
            group_size=shape.group_size,
            stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
            scaling=scaling,
            threads=1,
            step=7,
            # Below 0 no hits are counted.
            fade_shift=fade_shift,
        )
        selected = SelectedRows(len(self.sets), len(self.sets[0]), len(self.positions))
        tell(selected, self.sets)
        self.memory[:] = rows.memory
        out = torch.empty(shape.query_heads, shape.head_dim)
        is_hot = native_library().decode(
            "hillinfer_attend_tokens",
            variant.number,
            self.sequence.table_addresses[0],
            self.pool.table_address,
            ctypes.addressof(asked),
            selected.address,
            self.misses.address,
            out.data_ptr(),
        )
        return out if is_hot else None, selected.addresses


@every_variant
@pytest.mark.parametrize("count", [1, 64, 700])
def test_hot_rows_give_the_bits_of_several_calls(variant, count):
    shape = shape_of(3, 3, 64)
    rows = Rows(shape, count)
    attention = native_attention(variant, shape)
    scene = Scene(rows, count)
    out, addresses = scene.attend(variant, rows, rows.scaling)
    expected = attention.attend(rows.query, rows.scaling, [rows.addresses])
    assert addresses.tolist() == scene.expected.tolist()
    assert same_bits(out, expected)
    assert (scene.pool.columns.last_selected[rows.places] == 7).all()
    # The twin: one bit of the last row.
    rows.memory[rows.places[-1], -1] ^= 1
    out, _ = scene.attend(variant, rows, rows.scaling)
    assert not same_bits(out, expected)


@every_variant
def test_each_head_attends_to_its_own_set(variant):
    shape = shape_of(3, 2, 32)
    attention, rows = native_attention(variant, shape), Rows(shape, 400)
    scene = Scene(rows, 400)
    random = np.random.default_rng(1)
    scene.sets = [np.sort(random.permutation(400)[:150]) for _ in range(3)]
    out, addresses = scene.attend(variant, rows, rows.scaling)
    union = np.unique(np.concatenate(scene.sets))
    assert addresses.tolist() == scene.expected[union].tolist()
    own = [rows.addresses[one] for one in scene.sets]
    expected = attention.attend(rows.query, rows.scaling, own)
    assert same_bits(out, expected)
    # The twin: two heads with each other's set.
    scene.sets[:2] = scene.sets[1::-1]
    out, _ = scene.attend(variant, rows, rows.scaling)
    assert not same_bits(out[:2], expected[:2])
    assert same_bits(out[4:], expected[4:])


def test_a_cold_row_is_told_and_nothing_is_attended_to():
    rows = Rows(shape_of(2, 2, 32), 100)
    scene = Scene(rows, 100, cold=[40])
    out, addresses = scene.attend(_best(), rows, 1.0)
    assert out is None
    assert np.flatnonzero(addresses == 0).tolist() == [40]
    assert np.delete(addresses, 40).tolist() == np.delete(scene.expected, 40).tolist()
    assert (scene.misses.arrived, scene.misses.count) == (0, 1)
    missed = scene.misses.part(0, 1)
    assert (missed.numbers[0], missed.rows[0], missed.positions[0]) == (40, 40, 40)


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("policy", [PoolPolicy(), DecayedCounts()], ids=["counts", "fading"])
def test_hits_are_counted_as_the_policy_counts_them(policy, sets):
    """Each row once, however many sets have it."""
    rows = Rows(shape_of(2, 2, 32), 200)
    scene = Scene(rows, 200)
    random = np.random.default_rng(3)
    hits = random.integers(0, 1 << 16, 256).astype(np.uint16)
    # What is full already, and almost.
    hits[:5] = 65535, 65534, 65533, 49151, 49152
    expected = hits.copy()
    scene.sequence.hits.cover(0, len(hits))
    counts = scene.sequence.hits.counts[0]
    counts[: len(hits)] = hits
    hits = counts[: len(hits)]
    for _ in range(12):
        chosen = np.flatnonzero(random.random(200) < 0.5)
        scene.sets = [chosen] if sets == 1 else [chosen[:-7], chosen[7:]]
        scene.attend(_best(), rows, 1.0, policy.fade_shift)
        before = expected.copy()
        policy.tally(expected, chosen)
        np.testing.assert_array_equal(hits, expected)
        # The twin: a step whose hits are not counted leaves another table.
        assert (hits != before).any()


@pytest.mark.parametrize("positions", [[63], [-1], [0, 200]])
def test_a_position_that_is_nowhere_is_refused(positions):
    rows = Rows(shape_of(2, 2, 32), 64)
    scene = Scene(rows, 64)
    scene.sequence.set_length(0, 63, 63)
    scene.sets = [np.array(positions)]
    with pytest.raises(IndexError, match="behind the last token"):
        scene.attend(_best(), rows, 1.0)


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize("budget", [Budget.ALL_HOT, Budget.LEAST])
def test_a_step_in_one_call_is_one_a_part_after_the_other(cold_dir, monkeypatch, budget, scope):
    """Numbers and counts alike; and the library needs nobody to find its rows run by run."""
    fetched, outputs, counts = [], [], []
    as_it_is = Gather.in_place

    def fetch(self, *given):
        fetched.append(given)
        return as_it_is(self, *given)

    monkeypatch.setattr(Gather, "in_place", fetch)
    for prepare in (lambda runtime: None, PythonDecode.instead):
        outputs.append(_steps(cold_dir, budget, counts, prepare, scope=scope))
        counts[-1] = (*counts[-1], len(fetched))
        fetched.clear()
    assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))
    assert not same_bits(outputs[0][0], outputs[1][1])
    assert counts[0][:-1] == counts[1][:-1]
    assert (counts[0][-1], counts[1][-1]) == (0, 3)
    assert (counts[0][1] > 0) == (budget is Budget.LEAST)


def test_no_row_moves_between_the_look_and_attention(cold_dir):
    """Whoever finds a cold row goes on with the addresses of the others, so they must hold."""
    held, runtimes = [], []

    class Looking(DriveCalls):
        def land(self, *given):
            # Where the first row is asked for.
            held.append(is_held(runtimes[0].parts.pools.attending))
            return super().land(*given)

    _steps(cold_dir, Budget.LEAST, [], runtimes.append, calls=Looking())
    assert held
    assert all(held)


@pytest.mark.parametrize("budget", [Budget.ALL_HOT, Budget.LEAST])
def test_whoever_observes_a_step_may_wait_for_threads_that_move_rows(cold_dir, budget):
    held, runtimes = [], []

    def observe(entry):
        # Threads that move rows hold it for moments, which a busy machine makes long.
        held.append(is_held(runtimes[0].parts.pools.attending, seconds=30))

    _steps(cold_dir, budget, [], runtimes.append, observe)
    assert held
    assert not any(held)


def is_held(lock, seconds=0.5):
    """Say whether another thread would have to wait for as long as this one does not go on."""
    got = []

    def take():
        # Long enough for a row to be moved.
        got.append(lock.acquire(timeout=seconds))
        if got[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return not got[0]


def _steps(
    cold_dir, budget, counts, prepare=lambda runtime: None, observe=None, scope="layer", calls=None
):
    settings = Settings().changed(
        alpha=0.2, block_rows=40, kept_sinks=2, kept_recent=5, scope=scope
    )
    byte_count = budget.byte_count(SHAPE, settings, TOKENS)
    chosen = []
    runtime = Runtime(
        SHAPE,
        settings,
        byte_count,
        cold_dir,
        observe,
        observe_selected=lambda layer, length, sets: chosen.append([one.tolist() for one in sets]),
        calls=calls,
    )
    try:
        query, keys, values = random_states(0, 4, 2, TOKENS, TOKENS, 8)
        keys, values = keys.half(), values.half()
        prepare(runtime)
        sequence = runtime.open_sequence()
        runtime.append(0, sequence, keys[:, :297], values[:, :297])
        outputs = []
        for token in range(297, 300):
            own = slice(token, token + 1)
            runtime.begin_step()
            runtime.append(0, sequence, keys[:, own], values[:, own])
            outputs.append(runtime.attend_selected(0, sequence, query[:, own], keys[:, own], 0.4))
        known = runtime.statistics()
        hits = sequence.hits.counts[0].tolist()
        told = known.scored_tokens, known.selected_tokens, known.promoted_rows
        counts.append((known.hot_rows_read, known.cold_rows_read, hits, told, chosen))
        return outputs
    finally:
        runtime.close()


def _best():
    return native_library().variants[0]
