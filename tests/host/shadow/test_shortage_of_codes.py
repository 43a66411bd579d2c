# SPDX-License-Identifier: Apache-2.0
"""Codes that are short of memory: which stay, and who may take memory for them."""

import ctypes
import threading
from functools import partial

import numpy as np
import pytest

from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.native.library import native_library
from hillinfer.native.structures import row_addresses
from hillinfer.shadow.values import CHUNK_SLOTS, CodePool, ValueCodes
from hillinfer_model.kernel_spec import KernelSpec

ROW_BYTES = 40
FIRST, SECOND = np.arange(CHUNK_SLOTS), np.arange(CHUNK_SLOTS, 2 * CHUNK_SLOTS)
SPEC = KernelSpec(64, 2, 2)


def wanted_long(sequences):
    """Return a pool whose only slots hold tokens that many steps of so many sequences wanted."""
    pool = CodePool(ROW_BYTES)
    pool.cover(1000)
    pool.resize(CHUNK_SLOTS)
    for _ in range(400):
        pool.begin_step()
        for _ in range(sequences):
            pool.want(FIRST)
    assert offer(pool, FIRST) == CHUNK_SLOTS
    return pool


def offer(pool, rows):
    return pool.offer(
        rows, np.zeros(len(rows), np.int64), np.zeros((len(rows), ROW_BYTES), np.uint8)
    )


@pytest.mark.parametrize("sequences", [1, 8, 50])
@pytest.mark.filterwarnings("error")
def test_what_many_sequences_wanted_gives_way_in_time(sequences):
    pool = wanted_long(sequences)
    pool.want(SECOND)
    assert offer(pool, SECOND) == 0
    for _ in range(600):
        pool.begin_step()
        pool.want(SECOND)
    assert offer(pool, SECOND) == CHUNK_SLOTS
    addresses, _ = pool.find(FIRST, np.zeros(len(FIRST), np.int64))
    assert not addresses.any()


def test_the_last_codes_of_a_long_context_fit_too():
    """The tables grow by less than a sixteenth of it: what is missing is taken all the same."""
    accountant = Accountant(1 << 30)
    codes = ValueCodes(SPEC, 1, accountant, lambda: 0, lambda _: None)
    for rows in (20 * TABLE_GROWTH_ROWS, 20 * TABLE_GROWTH_ROWS + 1):
        codes.cover(rows)
        assert codes.hold_all
    # The twin lacks one byte for them.
    short = Accountant(sum(accountant.held().values()) - 1)
    codes = ValueCodes(SPEC, 1, short, lambda: 0, lambda _: None)
    for rows in (20 * TABLE_GROWTH_ROWS, 20 * TABLE_GROWTH_ROWS + 1):
        assert codes.hold_all
        codes.cover(rows)
    assert not codes.hold_all


def test_who_looks_takes_no_memory():
    """Another thread may look than the one that attends: to make room it would wait for that."""
    accountant = Accountant(1 << 20)
    codes = ValueCodes(SPEC, 2, accountant, lambda: 0, lambda _: None)
    numbers = np.zeros(len(SECOND), np.int64)
    assert not codes.look(0, lambda table: offered(table, SECOND, codes.coder.row_bytes))
    assert accountant.held()[Part.OTHER] == 0
    codes.cover(2 * CHUNK_SLOTS)
    assert accountant.held()[Part.OTHER] > 0
    assert codes.look(0, lambda table: offered(table, SECOND, codes.coder.row_bytes))
    addresses, _ = codes.find(0, SECOND, numbers)
    assert addresses.all()


def beside(act, seconds):
    """Begin to do something in another thread; return that, and whether it was done in time."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread, not thread.is_alive()


@pytest.mark.parametrize(("other", "is_free"), [(1, True), (0, False)], ids=["next", "same"])
def test_who_attends_to_a_layer_keeps_nobody_from_looking_at_the_next(other, is_free):
    """It waits for the drive meanwhile. The twin: its own layer's codes are nobody else's."""
    codes = ValueCodes(SPEC, 2, Accountant(1 << 20), lambda: 0, lambda _: None)
    threads = []

    def attend(_):
        look = partial(codes.look, other, bool)
        thread, is_done = beside(look, 60 if is_free else 0.2)
        threads.append(thread)
        return is_done

    assert codes.look(0, attend) is is_free
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_codes_stay_while_somebody_looks_whoever_needs_their_memory():
    accountant = Accountant(1 << 20)
    codes = ValueCodes(SPEC, 2, accountant, lambda: 0, lambda _: None)
    codes.cover(2 * CHUNK_SLOTS)
    numbers = np.zeros(len(SECOND), np.int64)
    rows = np.full((len(SECOND), codes.coder.row_bytes), 7, np.uint8)
    codes.offer(1, SECOND, numbers, rows)
    left = (1 << 20) - accountant.held()[Part.OTHER]
    threads = []

    def attend(_):
        thread, is_done = beside(partial(accountant.take, Part.OTHER, left), 0.2)
        threads.append(thread)
        addresses, _ = codes.layers[1].find(SECOND, numbers)
        return not is_done and addresses.all()

    assert codes.look(1, attend)
    threads[0].join(60)
    assert codes.held_bytes == 0
    addresses, _ = codes.find(1, SECOND, numbers)
    assert not addresses.any()


def offered(table, rows, row_bytes):
    """Offer codes as a step of the library's does, and say whether some are kept."""
    codes = np.zeros((len(rows), row_bytes), np.uint8)
    numbers, kept = np.zeros(len(rows), np.int64), ctypes.c_int64()
    places = row_addresses(codes, np.arange(len(rows)))
    given = rows.ctypes.data, numbers.ctypes.data, places.ctypes.data, len(rows)
    native_library().call("hillinfer_offer_codes", table, *given, ctypes.byref(kept))
    return kept.value > 0


@pytest.mark.parametrize("others", [900_000, 200_000])
def test_memory_that_others_took_first_is_not_counted_twice(others):
    """Between the look at what is left and the taking of it another thread takes some."""
    accountant = Accountant(1 << 20)
    coming = []

    def set_aside(_):
        if coming:
            accountant.take(Part.OTHER, coming.pop())

    codes = ValueCodes(SPEC, 2, accountant, lambda: 0, set_aside)
    numbers = np.zeros(len(SECOND), np.int64)
    rows = np.zeros((len(SECOND), codes.coder.row_bytes), np.uint8)
    if others < 500_000:
        # Some are kept, and more are wanted.
        codes.offer(0, SECOND, numbers, rows)
        assert codes.held_bytes > 0
    before = codes.held_bytes
    coming.append(others)
    codes.offer(0, SECOND + 5000, numbers, rows)
    assert not coming
    assert codes.held_bytes == before
    for _ in range(3):
        assert accountant.held()[Part.HOT] == codes.held_bytes
        codes.begin_step()
    assert codes.held_bytes > 0
