# SPDX-License-Identifier: Apache-2.0
"""Two buffers in turns: none is filled while somebody still looks at its rows."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from hillinfer.storage.gathered_rows import GatheredRows
from hillinfer.storage.read_cost import ReadCost
from hillinfer.storage.row_buffers import RowBuffers

ENOUGH, A_MOMENT = 30, 0.05


@pytest.fixture
def buffers():
    made = RowBuffers(4, 64)
    yield made
    made.close()


def in_a_thread(work):
    done = threading.Event()

    def run():
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


@pytest.mark.parametrize("lent", [0, 1])
def test_a_buffer_is_left_alone_until_its_promotion_has_ended(buffers, lent):
    promotion = Future()
    buffers.lend(lent, promotion)
    taken = in_a_thread(lambda: buffers.take(0, 3))
    # The twin: the other buffer's promotion is nothing to wait for.
    assert taken.wait(A_MOMENT if lent == 0 else ENOUGH) == (lent == 1)
    promotion.set_result((0, 0))
    assert taken.wait(ENOUGH)
    assert buffers.take(0, 3).shape == (3, 64)


def test_the_two_share_no_byte(buffers):
    first, second = buffers.take(0, 4), buffers.take(1, 4)
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    assert np.shares_memory(first, buffers.take(0, 1))
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("turn", [0, 1])
def test_settling_waits_for_what_was_begun_and_for_nothing_else(buffers, turn):
    gate = threading.Event()

    def fill(i):
        gate.wait(ENOUGH)
        return GatheredRows(buffers.take(i % 2, 2), np.arange(2), ReadCost(i, 0))

    upcoming = buffers.begin(fill, turn, 1)
    assert (upcoming is None) == (turn == 1)
    settled = in_a_thread(buffers.settle)
    assert settled.wait(A_MOMENT if turn == 0 else ENOUGH) == (turn == 1)
    gate.set()
    assert settled.wait(ENOUGH)
    if upcoming is not None:
        assert upcoming.result().cost.reads == turn
