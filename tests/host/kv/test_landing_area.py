# SPDX-License-Identifier: Apache-2.0
"""The life of a block: free, filling, ready, in use, free; anything else is refused."""

import threading

import numpy as np
import pytest

from hillinfer.drive.landing import BlockState, LandingArea

ROW_BYTES = 64
# Which calls each state allows, and what a block is afterwards.
STEPS = {
    BlockState.FREE: {},
    BlockState.FILLING: {"ready": BlockState.READY, "abandon": BlockState.FREE},
    BlockState.READY: {"use": BlockState.IN_USE, "give": BlockState.FREE},
    BlockState.IN_USE: {"give": BlockState.FREE},
}
WAY = {
    BlockState.FREE: [],
    BlockState.FILLING: ["take"],
    BlockState.READY: ["take", "ready"],
    BlockState.IN_USE: ["take", "ready", "use"],
}


def area_in(state):
    area = LandingArea(1, 4, ROW_BYTES)
    for call in WAY[state]:
        if call == "take":
            assert area.take(1) == [0]
        else:
            getattr(area, call)(0)
    assert area.states() == [state]
    return area


@pytest.mark.parametrize("state", BlockState)
@pytest.mark.parametrize("call", ["ready", "use", "give", "abandon"])
def test_only_the_next_step_is_allowed(state, call):
    area = area_in(state)
    if call in STEPS[state]:
        getattr(area, call)(0)
        assert area.states() == [STEPS[state][call]]
        return
    with pytest.raises(RuntimeError, match=f"block 0 is {state.value}"):
        getattr(area, call)(0)
    assert area.states() == [state]


def test_blocks_are_taken_as_far_as_they_are_free():
    area = LandingArea(3, 4, ROW_BYTES)
    assert area.take(5) == [0, 1]
    assert area.take(9) == [2]
    assert area.take(1) == []
    area.ready(1)
    area.give(1)
    assert area.take(1) == [1]
    assert area.take(0) == []


def test_an_area_without_blocks_takes_nothing():
    assert LandingArea(0, 4, ROW_BYTES).take(7) == []


def test_places_follow_the_blocks():
    area = LandingArea(3, 4, ROW_BYTES)
    assert area.rows.shape == (12, ROW_BYTES)
    np.testing.assert_array_equal(area.places([2, 0], 6), [8, 9, 10, 11, 0, 1])


def test_no_block_is_taken_twice_at_a_time():
    area = LandingArea(4, 1, ROW_BYTES)
    wrong = []

    def work(number):
        for _ in range(300):
            taken = area.take(2)
            for block in taken:
                area.rows[block] = number
            for block in taken:
                if not (area.rows[block] == number).all():
                    wrong.append(block)
                area.ready(block)
                area.use(block)
                area.give(block)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert area.states() == [BlockState.FREE] * 4


def test_blocks_for_all_rows_are_taken_or_none():
    area = LandingArea(3, 4, ROW_BYTES)
    blocks = []
    assert not area.take_all(13, blocks)
    assert blocks == []
    assert area.take_all(5, blocks)
    assert blocks == [0, 1]
    assert not area.take_all(5, [])
    area.all_ready(blocks)
    area.use(0)
    # Those that are filled, or looked at, stay as they are.
    area.all_ready(blocks)
    assert area.states() == [BlockState.IN_USE, BlockState.READY, BlockState.FREE]
    area.free_all(blocks)
    assert blocks == []
    assert area.states() == [BlockState.FREE] * 3
