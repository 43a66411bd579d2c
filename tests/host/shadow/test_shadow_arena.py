# SPDX-License-Identifier: Apache-2.0
"""An arena's places lie side by side, and where the system refuses each is memory of its own."""

import mmap

import numpy as np
import pytest

from hillinfer.drive.files import PAGE_BYTES
from hillinfer.shadow.arena import RUN_BYTES, ShadowArena

huge = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages"
)
PLACE = 3 * PAGE_BYTES


@huge
def test_places_lie_side_by_side_and_come_again():
    arena = ShadowArena(PLACE)
    held = [arena.take() for _ in range(4)]
    addresses = [one.ctypes.data for one in held]
    assert addresses == [addresses[0] + i * PLACE for i in range(4)]
    held[2][:] = 1
    del held[2]
    again = arena.take()
    assert again.ctypes.data == addresses[2]
    assert not again.any()


@huge
def test_another_run_follows_a_full_one():
    arena = ShadowArena(PLACE, run_bytes=2 * PLACE)
    held = [arena.take() for _ in range(5)]
    assert [run.taken_bytes for run in arena.runs] == [2 * PLACE, 2 * PLACE, PLACE]
    assert len({one.ctypes.data for one in held}) == 5
    first = held.pop(0).ctypes.data
    assert arena.take().ctypes.data == first


@huge
def test_a_shadow_larger_than_a_run_has_one_of_its_own():
    arena = ShadowArena(RUN_BYTES + PAGE_BYTES)
    assert arena.take().nbytes == RUN_BYTES + PAGE_BYTES


def refused(*_):
    raise OSError("refused")


@pytest.mark.parametrize("make_run", [refused, None])
def test_plain_memory_where_the_system_refuses(make_run):
    arena = ShadowArena(PLACE, make_run=make_run)
    held = [arena.take() for _ in range(3)]
    assert arena.runs == ()
    for one in held:
        assert one.nbytes == PLACE
        assert one.dtype == np.uint8
        assert one.ctypes.data % PAGE_BYTES == 0
        assert not one.any()
        one[:] = 1


@huge
def test_it_asks_only_once():
    asked = []
    arena = ShadowArena(PLACE, make_run=lambda *told: (asked.append(told), refused()))
    held = [arena.take() for _ in range(3)]
    assert len(held) == 3
    assert asked == [(PLACE, -(-RUN_BYTES // PLACE))]
