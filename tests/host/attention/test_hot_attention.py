# SPDX-License-Identifier: Apache-2.0
"""Attention over rows that are all in memory, found and attended to in one call."""

import numpy as np
import pytest
from exact_attention import random_states
from native_cases import Rows, every_variant, native_attention, same_bits, shape_of

from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.library import native_is_here, native_library
from hillinfer.native.structures import Places
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.pools.layer_step_log import LayerStepLog
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings
from hillinfer.storage.gather import Gather

SHAPE = ModelShape(1, 2, 4, 8, StoredType.FLOAT16, 10_000)
TOKENS = 300


class Scene:
    """All of some rows in slots, but for those that are told to be on the drive."""

    def __init__(self, rows, count, cold=()):
        slots = np.full(64 * -(-count // 64), -1, np.int32)
        slots[:count] = rows.places
        slots[list(cold)] = -1
        self.positions = np.arange(count)
        self.groups = np.arange(len(slots) // 64)
        self.stamps = np.zeros(len(rows.memory), np.int32)
        self.places = Places(
            self.positions.ctypes.data,
            count,
            len(slots),
            len(slots),
            len(slots),
            0,
            self.groups.ctypes.data,
            len(self.groups),
            slots.ctypes.data,
            len(slots),
            self.stamps.ctypes.data,
            rows.memory.ctypes.data,
            rows.memory.shape[1],
            7,
        )
        self.places.kept = (slots,)


@every_variant
@pytest.mark.parametrize("count", [1, 64, 700])
def test_hot_rows_give_the_bits_of_several_calls(variant, count):
    shape = shape_of(3, 3, 64)
    rows = Rows(shape, count)
    attention = native_attention(variant, shape)
    scene = Scene(rows, count)
    out, addresses = attention.attend_hot(rows.query, rows.scaling, scene.places)
    expected = attention.attend(rows.query, rows.scaling, [rows.addresses])
    assert addresses.tolist() == rows.addresses.tolist()
    assert same_bits(out, expected)
    assert (scene.stamps[rows.places] == 7).all()
    # The twin: one bit of the last row.
    rows.memory[rows.places[-1], -1] ^= 1
    out, _ = attention.attend_hot(rows.query, rows.scaling, scene.places)
    assert not same_bits(out, expected)


def test_a_cold_row_is_told_and_nothing_is_attended_to():
    shape = shape_of(2, 2, 32)
    rows = Rows(shape, 100)
    attention = native_attention(_best(), shape)
    out, addresses = attention.attend_hot(rows.query, 1.0, Scene(rows, 100, cold=[40]).places)
    assert out is None
    assert np.flatnonzero(addresses == 0).tolist() == [40]
    assert np.delete(addresses, 40).tolist() == np.delete(rows.addresses, 40).tolist()


def test_a_position_that_is_nowhere_is_refused():
    shape = shape_of(2, 2, 32)
    rows = Rows(shape, 64)
    attention = native_attention(_best(), shape)
    scene = Scene(rows, 64)
    scene.places.length = 63
    with pytest.raises(IndexError, match="behind the last token"):
        attention.attend_hot(rows.query, 1.0, scene.places)
    scene.places.count = 0
    with pytest.raises(ValueError, match="no rows"):
        attention.attend_hot(rows.query, 1.0, scene.places)


@pytest.mark.parametrize("everything_hot", [True, False])
def test_a_step_whose_rows_are_all_hot_takes_one_call(cold_dir, monkeypatch, everything_hot):
    """And its numbers and counts are those of a step that reads rows run by run."""
    if not native_is_here():
        pytest.skip("no native library: run python tools/build_native.py")
    fetched, outputs, counts = [], [], []
    as_it_is, in_runs = Gather.in_place, Gather.attend_hot

    def fetch(self, *given):
        fetched.append(given)
        return as_it_is(self, *given)

    def never_at_once(self, layer, sequence, positions, step, attend):
        return None, self._keeper.begin_in_place(layer, sequence, positions, step)

    monkeypatch.setattr(Gather, "in_place", fetch)
    for attend_hot in (in_runs, never_at_once):
        monkeypatch.setattr(Gather, "attend_hot", attend_hot)
        outputs.append(_steps(cold_dir, everything_hot, counts))
        counts[-1] = (*counts[-1], len(fetched))
        fetched.clear()
    assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))
    assert not same_bits(outputs[0][0], outputs[1][1])
    assert counts[0][:3] == counts[1][:3]
    assert counts[1][3] == 3
    if everything_hot:
        assert counts[0][3] == 0
    else:
        assert counts[0][3] > 0


def test_no_row_moves_between_the_look_and_attention(cold_dir, monkeypatch):
    """Whoever finds a cold row goes on with the addresses of the others, so they must hold."""
    if not native_is_here():
        pytest.skip("no native library: run python tools/build_native.py")
    held = []
    as_it_is = Gather.in_place

    def fetch(self, *given):
        # Where the first row is asked for. A lock of one's own can be had again; its owner says
        # whether it is held already.
        held.append(self.attending._is_owned())
        yield from as_it_is(self, *given)

    monkeypatch.setattr(Gather, "in_place", fetch)
    _steps(cold_dir, False, [])
    assert held
    assert all(held)


@pytest.mark.parametrize("everything_hot", [True, False])
def test_whoever_observes_a_step_may_wait_for_threads_that_move_rows(
    cold_dir, monkeypatch, everything_hot
):
    if not native_is_here():
        pytest.skip("no native library: run python tools/build_native.py")
    held = []
    as_it_is = LayerStepLog.end

    def end(self, entry):
        held.append(self._pools.attending._is_owned())
        as_it_is(self, entry)

    monkeypatch.setattr(LayerStepLog, "end", end)
    _steps(cold_dir, everything_hot, [])
    assert held
    assert not any(held)


def _steps(cold_dir, everything_hot, counts):
    settings = Settings().changed(alpha=0.2, block_rows=40, kept_sinks=2, kept_recent=5)
    least = BudgetPlan.with_whole_shadow(SHAPE, settings, TOKENS).required_bytes
    runtime = Runtime(SHAPE, settings, least + (4 << 20 if everything_hot else 0), cold_dir)
    try:
        query, keys, values = random_states(0, 4, 2, TOKENS, TOKENS, 8)
        keys, values = keys.half(), values.half()
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
        counts.append((known.hot_rows_read, known.cold_rows_read, hits))
        return outputs
    finally:
        runtime.close()


def _best():
    if not native_is_here():
        pytest.skip("no native library: run python tools/build_native.py")
    return native_library().variants[0]
