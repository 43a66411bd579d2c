# SPDX-License-Identifier: Apache-2.0
"""Rows of a store become a cache's keys and values, bit for bit, wherever they begin and end."""

import copy
import gc
import threading

import numpy as np
import pytest
import torch

from hillinfer.arrived_rows import ArrivedRows
from hillinfer.drive.files import aligned_buffer
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.reuse.landed_states import LandedStates
from hillinfer.store.keys import group_sums
from hillinfer.system.kept_memory import KeptMemory

TOKENS, ROOM = 200, 331
ENOUGH = 20
TYPES = {StoredType.BFLOAT16: torch.bfloat16, StoredType.FLOAT16: torch.float16}


def shape_of(stored, head_dim):
    """Return a shape of two layers."""
    return ModelShape(2, 3, 3, head_dim, stored, max_positions=4096)


def rows_of(shape, seed=0):
    """Return rows that have every pattern of 16 bits: infinities, NaN, subnormal numbers."""
    size = TOKENS * shape.row_bytes
    rows = aligned_buffer(size)[:size].reshape(TOKENS, -1)
    patterns = np.random.default_rng(seed).permutation(1 << 16).astype(np.uint16)
    rows[:] = np.resize(patterns, rows.size // 2).view(np.uint8).reshape(rows.shape)
    return rows


def expected(layout, rows, dtype):
    """Return what torch makes of rows: keys and values, (kv_heads, tokens, head_dim)."""
    own = torch.from_numpy(rows)
    return [one.transpose(0, 1).to(dtype) for one in (layout.keys(own), layout.values(own))]


def bits(states):
    """Return states as numbers that compare: every NaN is the same one."""
    wide = states.to(torch.float32)
    return torch.where(wide.isnan(), torch.full_like(wide, torch.nan), wide).view(torch.int32)


@pytest.mark.parametrize("head_dim", [64, 80, 24])
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("kind", ["stored", torch.float32, torch.float64])
def test_rows_become_states_as_torch_makes_them(stored, kind, head_dim):
    shape = shape_of(stored, head_dim)
    dtype = TYPES[stored] if kind == "stored" else kind
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(shape, layout, ROOM, dtype, "cpu", KeptMemory())
    for pair in states.layers:
        for one in pair:
            one.fill_(7)
    # In two runs, the second cut off, and from no border of anything.
    states.place(1, 5, rows[:70], 5 + 190)
    states.place(1, 75, rows[70:], 5 + 190)
    for own, known in zip(states.layers[1], expected(layout, rows, dtype), strict=True):
        assert own.dtype is dtype
        assert torch.equal(bits(own[:, 5:195]), bits(known[:, :190]))
        assert (own[:, :5] == 7).all()
        assert (own[:, 195:] == 7).all()
    assert all((one == 7).all() for one in states.layers[0])


def test_another_bit_is_another_state():
    shape = shape_of(StoredType.BFLOAT16, 64)
    layout, rows = RowLayout(shape), rows_of(shape)
    rows[:] = 0
    known = expected(layout, rows, torch.float32)
    rows[130, -1] ^= 1
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", KeptMemory())
    states.place(0, 0, rows, TOKENS)
    same = [
        torch.equal(bits(own[:, :TOKENS]), bits(one))
        for own, one in zip(states.layers[0], known, strict=True)
    ]
    assert same == [True, False]


def test_several_threads_place_at_once():
    shape = shape_of(StoredType.FLOAT16, 64)
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", KeptMemory())
    threads = [
        threading.Thread(target=states.place, args=(layer, at, rows[at : at + 50], TOKENS))
        for layer in range(2)
        for at in range(0, TOKENS, 50)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for pair in states.layers:
        for own, known in zip(pair, expected(layout, rows, torch.float32), strict=True):
            assert torch.equal(bits(own[:, :TOKENS]), bits(known))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("kind", ["stored", torch.float32])
def test_rows_are_checked_and_placed_at_once(stored, kind, threads):
    shape = shape_of(stored, 64)
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(
        shape, layout, ROOM, TYPES[stored] if kind == "stored" else kind, "cpu", KeptMemory()
    )
    assert states.is_native
    for own in (one for pair in states.layers for one in pair):
        own.fill_(7)
    # Two groups of one layer, and one of the other that is wanted in part.
    salts = np.array([3, 1 << 31, 77], np.uint32)
    parts = (1, 10, rows[:128], salts[:2]), (0, 64, rows[128:192], salts[2:])
    arrived = [
        ArrivedRows(layer, position, own, own_salts, group_sums(own, own_salts), list, list)
        for layer, position, own, own_salts in parts
    ]
    offered = states.offer(arrived, 100)
    sums = offered.place(threads)
    assert offered.is_placed(0)
    assert offered.end(ENOUGH)
    assert offered.end(0)
    for one, own, (*_, whole, own_salts) in zip(arrived, sums, parts, strict=True):
        assert (own == group_sums(whole, own_salts)).all()
        assert (own != group_sums(whole, own_salts ^ 1)).all()
        assert one.layer in (0, 1)
    known = expected(layout, rows, states.layers[0][0].dtype)
    for layer, first, start, stop in ((1, 10, 0, 90), (0, 64, 128, 164)):
        for own, one in zip(states.layers[layer], known, strict=True):
            end = first + stop - start
            assert torch.equal(bits(own[:, first:end]), bits(one[:, start:stop]))
            assert (own[:, :first] == 7).all()
            assert (own[:, end:] == 7).all()


def test_flushed_subnormal_numbers_change_no_row():
    # Such a row's numbers do not fill the widest registers: they are widened one by one.
    shape = shape_of(StoredType.FLOAT16, 24)
    layout, rows = RowLayout(shape), rows_of(shape)
    rows.view(np.uint16)[:] = np.arange(rows.size // 2, dtype=np.uint16).reshape(TOKENS, -1) & 1023
    known = expected(layout, rows, torch.float32)
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", KeptMemory())
    salts = np.array([3, 77], np.uint32)
    arrived = ArrivedRows(1, 0, rows[:128], salts, group_sums(rows[:128], salts), list, list)
    torch.set_flush_denormal(True)
    try:
        states.place(0, 0, rows, TOKENS)
        offered = states.offer([arrived], 128)
        offered.place(3)
    finally:
        torch.set_flush_denormal(False)
    assert offered.end(ENOUGH)
    for layer, stop in ((0, TOKENS), (1, 128)):
        for own, one in zip(states.layers[layer], known, strict=True):
            assert torch.equal(bits(own[:, :stop]), bits(one[:, :stop]))
    assert (states.layers[0][0][:, :TOKENS] != 0).any()


def test_rows_that_nobody_waits_for_come_to_their_places():
    shape = shape_of(StoredType.BFLOAT16, 64)
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", KeptMemory())
    for own in (one for pair in states.layers for one in pair):
        own.fill_(7)
    salts = np.array([3, 77], np.uint32)
    every = [
        ArrivedRows(layer, 64, rows[:128], salts, group_sums(rows[:128], salts), dict, list)
        for layer in range(2)
    ]
    waiting = [states.offer([one], 150) for one in every]
    assert all(one.is_placed(ENOUGH) for one in waiting)
    # What was placed already is not placed again, and checksums are known all the same.
    rows_before = rows.copy()
    rows[:] ^= 255
    for offered, one in zip(waiting, every, strict=True):
        (sums,) = offered.place(2)
        one.check(sums)
        assert offered.end(ENOUGH)
    for pair in states.layers:
        for own, known in zip(pair, expected(layout, rows_before, torch.float32), strict=True):
            assert torch.equal(bits(own[:, 64:150]), bits(known[:, :86]))
            assert (own[:, :64] == 7).all()
            assert (own[:, 150:] == 7).all()


def test_whoever_copies_states_copies_no_others():
    shape = shape_of(StoredType.BFLOAT16, 64)
    states = LandedStates(shape, RowLayout(shape), ROOM, torch.float32, "cpu", KeptMemory())
    for own in (one for pair in states.layers for one in pair):
        own.fill_(1)
        byte_count = own.untyped_storage().nbytes()
        assert byte_count == own.nbytes
    # Both are of one block.
    memo = {}
    first = copy.deepcopy(states.layers[0][0], memo)
    states.layers[1][1].fill_(2)
    assert (copy.deepcopy(states.layers[1][1], memo) == 2).all()
    assert (first == 1).all()


def test_a_part_of_a_cache_keeps_its_memory():
    shape, memory = shape_of(StoredType.BFLOAT16, 64), KeptMemory()
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", memory)
    states.place(1, 0, rows, TOKENS)
    values = states.layers[1][1][:, 3:TOKENS]
    del states
    gc.collect()
    assert memory.kept_bytes == 0
    other = LandedStates(shape, layout, ROOM, torch.float32, "cpu", memory)
    for pair in other.layers:
        for one in pair:
            one.fill_(7)
    _, known = expected(layout, rows, torch.float32)
    assert torch.equal(bits(values), bits(known[:, 3:]))
    del values, other
    gc.collect()
    assert memory.kept_bytes > 0
