# SPDX-License-Identifier: Apache-2.0
"""Rows of a store become a cache's keys and values, bit for bit, in memory that is used again."""

import gc
import threading

import numpy as np
import pytest
import torch

from hillinfer.drive.files import aligned_buffer
from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.reuse.landed_states import LandedStates, StateRooms

TOKENS, ROOM = 200, 331
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
    states = LandedStates(shape, layout, ROOM, dtype, "cpu", StateRooms())
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
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", StateRooms())
    states.place(0, 0, rows, TOKENS)
    same = [
        torch.equal(bits(own[:, :TOKENS]), bits(one))
        for own, one in zip(states.layers[0], known, strict=True)
    ]
    assert same == [True, False]


def test_several_threads_place_at_once():
    shape = shape_of(StoredType.FLOAT16, 64)
    layout, rows = RowLayout(shape), rows_of(shape)
    states = LandedStates(shape, layout, ROOM, torch.float32, "cpu", StateRooms())
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


def places(rooms):
    return [one.data_ptr() for one in rooms.tensors((3, 100, 64), torch.float32, 4)]


def test_memory_of_a_dropped_cache_is_taken_again():
    rooms = StateRooms()
    own = list(rooms.tensors((3, 100, 64), torch.float32, 4))
    first = [one.data_ptr() for one in own]
    assert all(place % 4096 == 0 for place in first)
    assert len(set(first)) == 4
    # A view of one of them holds what it shares a block with.
    view = own[2][:, 10:]
    del own
    gc.collect()
    assert rooms.kept_bytes == 0
    assert places(rooms) != first
    view.fill_(3)
    assert (view == 3).all()
    del view
    gc.collect()
    assert rooms.kept_bytes > 0
    kept = rooms.kept_bytes
    assert first in (places(rooms), places(rooms))
    gc.collect()
    assert rooms.kept_bytes == kept


def test_no_more_memory_is_kept_than_is_allowed():
    rooms = StateRooms(most_blocks=1)
    own = [list(rooms.tensors((3, 100, 64), torch.float32, 1)) for _ in range(3)]
    del own
    gc.collect()
    (size,) = {rooms.kept_bytes}
    assert 0 < size <= 64 << 20
    assert StateRooms(most_blocks=0).kept_bytes == 0
