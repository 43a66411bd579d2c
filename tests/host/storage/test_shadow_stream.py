# SPDX-License-Identifier: Apache-2.0
"""Shadows come in order, small ones several at once, and each is the one that was asked for."""

import numpy as np
import pytest

from hillinfer.counters import Counters
from hillinfer.errors import ColdPoolError
from hillinfer.storage import shadow_stream
from hillinfer.storage.cold_file import ColdFile, IOMode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_plan import MAX_READ_BYTES
from hillinfer.storage.shadow_store import STREAM_BUFFERS, ShadowStore, shadow_bytes
from hillinfer.storage.shadow_stream import ShadowStream, together_of
from hillinfer.storage.stored_base import ShadowBase
from hillinfer.storage.thread_engine import ThreadEngine
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(64, 1, 3)
LARGE = KernelSpec(128, 8, 1)


class CountingEngine(ThreadEngine):
    """Notes how many reads each call makes; fails while it is told to."""

    def __init__(self):
        super().__init__(2)
        self.calls = []
        self.fails = False

    def read(self, file, buffer, reads):
        self.calls.append(len(reads))
        if self.fails:
            raise ColdPoolError("on purpose")
        super().read(file, buffer, reads)


@pytest.fixture
def engine():
    one = CountingEngine()
    yield one
    one.close()


def filled(store, slots):
    """Write shadows that differ everywhere, and return them by slot."""
    shadows = {}
    for slot in slots:
        shadows[slot] = store.buffer()
        shadows[slot][:] = np.random.default_rng(slot).integers(0, 256, shadows[slot].shape)
        store.write(slot, shadows[slot]).result()
    return shadows


def opened(tmp_path, engine, spec=SPEC, base=None):
    store = ShadowStore(tmp_path, IOMode.BUFFERED, spec, engine, DriveCalls(), base)
    return store, ShadowStream(store, counters := Counters()), counters


def check(stream, shadows, slots):
    stream.begin(slots)
    for slot in slots:
        for _ in range(2):
            np.testing.assert_array_equal(stream.shadow(slot), shadows[slot])


@pytest.mark.parametrize(("spec", "calls"), [(SPEC, [4, 4, 2]), (LARGE, None)])
def test_small_ones_come_together(tmp_path, engine, spec, calls):
    store, stream, counters = opened(tmp_path, engine, spec)
    slots = [store.take() for _ in range(10)][::-1]
    shadows = filled(store, slots)
    check(stream, shadows, slots)
    assert counters.shadow_read_bytes == 10 * store.slot_bytes
    if calls is None:
        # Large ones have a read in the drive while one of them is scored.
        calls = [-(-store.slot_bytes // MAX_READ_BYTES)] * 10
    assert engine.calls == calls
    shadows[slots[5]][3, 3] ^= 1
    with pytest.raises(AssertionError, match="not equal"):
        check(stream, shadows, slots)
    store.close()


def test_who_asks_in_another_order_starts_over(tmp_path, engine):
    store, stream, _ = opened(tmp_path, engine)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    stream.begin(slots)
    # Once more from the beginning, and past some that nobody asks for.
    for slot in (*slots, *slots, 0, 1, 5, 6):
        np.testing.assert_array_equal(stream.shadow(slot), shadows[slot])
    with pytest.raises(ValueError, match="not in list"):
        stream.shadow(99)
    store.close()


def test_an_error_is_told_and_the_next_may_succeed(tmp_path, engine):
    store, stream, _ = opened(tmp_path, engine)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    for _ in range(STREAM_BUFFERS):
        engine.fails = True
        stream.begin(slots)
        with pytest.raises(ColdPoolError, match="on purpose"):
            stream.shadow(slots[0])
        engine.fails = False
        check(stream, shadows, slots)
    store.close()


@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["one set of buffers", "several"])
@pytest.mark.parametrize("reads", [True, False], ids=["after it started", "before"])
def test_a_read_that_does_not_start_loses_no_buffers(tmp_path, engine, monkeypatch, spec, reads):
    """As after Ctrl-C, or where the system has no thread left."""
    store, stream, _ = opened(tmp_path, engine, spec)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    own, started = store.read_together, []

    def raises(*asked):
        if reads:
            started.append(own(*asked))
        raise KeyboardInterrupt

    for _ in range(STREAM_BUFFERS + 1):
        with monkeypatch.context() as patched:
            patched.setattr(store, "read_together", raises)
            with pytest.raises(KeyboardInterrupt):
                stream.begin(slots)
            for one in started:
                one.result()
        check(stream, shadows, slots)
    store.close()


def test_buffers_given_twice_are_given_once(tmp_path, engine, monkeypatch):
    """Ctrl-C between the two lines of giving them back."""
    store, stream, _ = opened(tmp_path, engine, LARGE)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    stream.begin(slots)
    stream.shadow(slots[0])
    stream._free.append(stream._current.buffers)
    check(stream, shadows, slots)
    store.close()


def test_begin_waits_for_a_read_that_stands_in_no_line(tmp_path, engine, monkeypatch):
    """Ctrl-C after it started and before its place in line: it still writes to its buffers."""
    store, stream, _ = opened(tmp_path, engine)
    slots = [store.take() for _ in range(7)]
    filled(store, slots)
    stream.begin(slots)
    stream._ahead.clear()
    waited = []
    monkeypatch.setattr(shadow_stream, "wait", lambda readings: waited.append(len(readings)))
    stream.begin(slots)
    assert waited == [1]
    store.close()


def test_slots_of_a_base_and_of_the_own_file_come_together(tmp_path, engine):
    first, _, _ = opened(tmp_path, engine)
    shadows = filled(first, [first.take() for _ in range(3)])
    file = first._opened()
    base = ShadowBase(file, 3, first.slot_bytes)
    assert isinstance(file, ColdFile)
    store, stream, _ = opened(tmp_path, engine, base=base)
    shadows |= filled(store, [store.take() for _ in range(3)])
    check(stream, shadows, [0, 3, 1, 4, 5, 2])
    store.close()
    first.close()


def test_how_many_come_together():
    sizes = [4096, MAX_READ_BYTES // 4, MAX_READ_BYTES // 4 + 4096, MAX_READ_BYTES, 10**8]
    assert [together_of(size) for size in sizes] == [4, 4, 2, 1, 1]
    assert shadow_bytes(SPEC) <= MAX_READ_BYTES // 4 < MAX_READ_BYTES < shadow_bytes(LARGE)
