# SPDX-License-Identifier: Apache-2.0
"""Rows that were there stay what they were where taking others in breaks off, wherever that is."""

import threading

import pytest
from interrupts import interrupted_at
from runtime_rows import (
    SETTINGS,
    SHAPE,
    check_drive,
    check_slots,
    check_tails,
    fill,
    rows_of,
)

from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError
from hillinfer.kv.rows import SequenceManager
from hillinfer.kv.sequence import RowLayout
from hillinfer.memory_budget import Part

# A buffer has two groups, so what fills them both leaves the open group that there was.
CHOSEN = SETTINGS.changed(block_rows=128)
STORED = 100


@pytest.fixture
def runtime(cold_dir):
    made = Runtime(SHAPE, CHOSEN, staging_bytes(SHAPE, CHOSEN) + (1 << 20), cold_dir)
    yield made
    made.close()


def stored(runtime, seed=1, tokens=STORED):
    """Return a sequence and its rows, some of them in the open group."""
    sequence = runtime.open_sequence()
    states = fill(runtime, sequence, tokens, seed)
    return sequence, [rows_of(states, layer) for layer in range(SHAPE.layers)]


def check_rows(runtime, known):
    check_tails(known)
    check_slots(runtime, known)
    check_drive(runtime, known)


def take_all(accountant):
    """Take what a budget has left, hot rows too."""
    size = accountant.budget_bytes
    while size:
        try:
            accountant.take(Part.OTHER, size)
        except BudgetError:
            size //= 2


def test_an_error_leaves_the_open_group_as_it_was(runtime):
    """There is no memory left to count hits in when tokens come that begin in an open group."""
    known = [stored(runtime, tokens=1000), stored(runtime, tokens=200)]
    sequence = known[0][0]
    take_all(runtime.parts.accountant)
    with pytest.raises(BudgetError):
        fill(runtime, sequence, 88, seed=2)
    # The twin: the rows did not come, so they are not there.
    assert list(sequence.lengths) == [1000] * SHAPE.layers
    runtime.truncate(sequence, 1000)
    check_rows(runtime, known)


def interrupt_everywhere(runtime, function, tokens):
    """Break off at each moment that functions of a file begin or end at; return how many came."""
    number = 0
    while True:
        known = [stored(runtime, number)]
        sequence = known[0][0]
        runtime.begin_step()
        try:
            with interrupted_at(function, number):
                fill(runtime, sequence, tokens, seed=2)
        except KeyboardInterrupt:
            pass
        else:
            return number
        runtime.truncate(sequence, STORED)
        check_rows(runtime, known)
        runtime.release(sequence)
        number += 1


@pytest.mark.parametrize("tokens", [92, 110])
@pytest.mark.parametrize("function", [SequenceManager.append, RowLayout.pack])
def test_an_interrupt_leaves_rows_and_buffers_as_they_were(runtime, function, tokens):
    """There are two buffers; one that an interrupt left taken would soon be waited for."""
    came = []
    attempt = threading.Thread(
        target=lambda: came.append(interrupt_everywhere(runtime, function, tokens)), daemon=True
    )
    attempt.start()
    attempt.join(120)
    assert not attempt.is_alive(), "waits for a buffer that never comes"
    assert came, "rows changed"
    assert came[0] > 10
