# SPDX-License-Identifier: Apache-2.0
"""Two buffers in turns: none is filled while somebody still looks at its rows."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from hillinfer.drive.landing import RowBuffers

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


@pytest.mark.parametrize("begun", [True, False])
def test_settling_waits_for_what_was_begun_and_for_nothing_else(buffers, begun):
    gate = threading.Event()

    def fill():
        gate.wait(ENOUGH)
        return buffers.take(0, 2)

    upcoming = buffers.begin(fill) if begun else None
    settled = in_a_thread(buffers.settle)
    assert settled.wait(A_MOMENT if begun else ENOUGH) != begun
    gate.set()
    assert settled.wait(ENOUGH)
    if upcoming is not None:
        assert upcoming.result().shape == (2, 64)
