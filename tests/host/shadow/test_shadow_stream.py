# SPDX-License-Identifier: Apache-2.0
"""Shadows come in order, small ones several at once, and each is the one that was asked for."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from twins.python_reads import ThreadEngine

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ColdFile, IOMode
from hillinfer.drive.landing import MAX_READ_BYTES
from hillinfer.drive.shared_files import ShadowBase
from hillinfer.errors import ColdPoolError
from hillinfer.shadow.store import (
    STREAM_BUFFERS,
    ShadowStore,
    ShadowStream,
    shadow_bytes,
    together_of,
)
from hillinfer.statistics import Counters
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(64, 1, 3)
LARGE = KernelSpec(128, 8, 1)
# Of many heads: a shadow is larger than a huge page.
WIDE = KernelSpec(128, 32, 1)
# Seconds after which a busy machine, too, has done it.
ENOUGH = 60


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


def opened(tmp_path, engine, spec=SPEC, kind=ShadowStore):
    store = kind(tmp_path, IOMode.BUFFERED, spec, engine, DriveCalls())
    return store, ShadowStream(store, counters := Counters()), counters


def check(stream, shadows, slots):
    stream.begin(slots)
    for slot in slots:
        for _ in range(2):
            np.testing.assert_array_equal(stream.shadow(slot), shadows[slot])


@pytest.mark.parametrize(("spec", "calls"), [(SPEC, [4, 4, 2]), (LARGE, None), (WIDE, None)])
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


@pytest.mark.parametrize("spec", [SPEC, LARGE, WIDE])
def test_a_shadow_is_read_wherever_its_memory_lies(tmp_path, engine, spec):
    store, _, _ = opened(tmp_path, engine, spec)
    slots = [store.take() for _ in range(3)]
    shadows = filled(store, slots)
    _, together = store.buffers(len(slots))
    for slot, part in zip(slots, together, strict=True):
        alone = store.buffer()
        for into in (alone, part):
            store.read(slot, into).result()
            np.testing.assert_array_equal(into, shadows[slot])
        alone[-1, -1] ^= 1
        with pytest.raises(AssertionError, match="not equal"):
            np.testing.assert_array_equal(alone, part)
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


class Interrupted(ShadowStore):
    """Is interrupted, before it starts a read or after, while it is told to be."""

    when = None

    def read_together(self, *asked):
        if self.when == "before":
            raise KeyboardInterrupt
        started = super().read_together(*asked)
        if self.when == "after it started":
            started.result()
            raise KeyboardInterrupt
        return started


@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["one set of buffers", "several"])
@pytest.mark.parametrize("when", ["after it started", "before"])
def test_a_read_that_does_not_start_loses_no_buffers(tmp_path, engine, spec, when):
    """As after Ctrl-C, or where the system has no thread left."""
    store, stream, _ = opened(tmp_path, engine, spec, Interrupted)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    for _ in range(STREAM_BUFFERS + 1):
        store.when = when
        with pytest.raises(KeyboardInterrupt):
            stream.begin(slots)
        store.when = None
        check(stream, shadows, slots)
    store.close()


def test_buffers_given_twice_are_given_once(tmp_path, engine):
    """Ctrl-C between the two lines of giving them back."""
    store, stream, _ = opened(tmp_path, engine, LARGE)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    stream.begin(slots)
    stream.shadow(slots[0])
    stream._free.append(stream._current.buffers)
    check(stream, shadows, slots)
    store.close()


class HeldEngine(CountingEngine):
    """Reads while its gate is open."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def read(self, file, buffer, reads):
        assert self.gate.wait(ENOUGH)
        super().read(file, buffer, reads)


def test_begin_waits_for_a_read_that_stands_in_no_line(tmp_path):
    """Ctrl-C after it started and before its place in line: it still writes to its buffers."""
    engine = HeldEngine()
    store, stream, _ = opened(tmp_path, engine)
    slots = [store.take() for _ in range(7)]
    shadows = filled(store, slots)
    stream.begin(slots)
    stream._ahead.clear()
    second = threading.Thread(target=stream.begin, args=(slots,))
    second.start()
    second.join(0.1)
    waits = second.is_alive()
    engine.gate.set()
    second.join(ENOUGH)
    assert waits
    assert not second.is_alive()
    check(stream, shadows, slots)
    store.close()
    engine.close()


class Kept:
    """A file that notes when it is closed, and stays open."""

    def __init__(self, file):
        self._file = file
        self.closed = False

    def __getattr__(self, name):
        return getattr(self._file, name)

    def close(self):
        self.closed = True


def made_base(tmp_path, engine, count, seed, key=None):
    """Return a base of slots with other shadows than any other's, and those shadows."""
    store, _, _ = opened(tmp_path, engine)
    for _ in range(seed):
        store.take()
    slots = [store.take() for _ in range(count)]
    shadows = list(filled(store, slots).values())
    content = b"".join(bytes(shadow.base.data) for shadow in shadows)
    file = ColdFile(tmp_path, IOMode.BUFFERED, f"base {seed}")
    file.write(memoryview(content), 0)
    store.close()
    return ShadowBase(Kept(file), count, store.slot_bytes, key=key), shadows


def test_slots_of_bases_and_of_the_own_file_come_together(tmp_path, engine):
    store, stream, _ = opened(tmp_path, engine)
    shadows = filled(store, [store.take()])
    bases = [made_base(tmp_path, engine, count, seed) for count, seed in ((3, 10), (4, 20))]
    firsts = []
    for base, content in bases:
        firsts.append(store.add_base(base))
        shadows |= {firsts[-1] + i: shadow for i, shadow in enumerate(content)}
    own = [store.take() for _ in range(3)]
    assert not {*own} & {*shadows}
    shadows |= filled(store, own)
    first, second = firsts
    check(stream, shadows, [0, first, own[0], second + 3, own[1], first + 2, second, own[2]])
    # A base goes with the last slot that anybody has of it, and its numbers are used again.
    store.share(first + 1)
    store.let_base_go(first)
    store.let_base_go(second)
    assert [base.file.closed for base, _ in bases] == [False, True]
    store.give(first + 1)
    assert bases[0][0].file.closed
    again = [store.take() for _ in range(7)]
    assert {*again} == {*range(first, first + 3), *range(second, second + 4)}
    shadows |= filled(store, again)
    check(stream, shadows, [*own, *again, 0])
    store.close()


def test_the_same_base_is_open_once(tmp_path, engine):
    store, _, _ = opened(tmp_path, engine)
    one, two, other = (made_base(tmp_path, engine, 2, 1, key)[0] for key in ("a", "a", "b"))
    first = store.add_base(one)
    assert store.add_base(two) == first
    assert store.add_base(other) != first
    assert [base.file.closed for base in (one, two, other)] == [False, True, False]
    store.let_base_go(first)
    assert not one.file.closed
    store.let_base_go(first)
    assert one.file.closed
    store.close()
    assert other.file.closed


def test_a_base_of_another_layout_is_none(tmp_path, engine):
    store, _, _ = opened(tmp_path, engine)
    base, _ = made_base(tmp_path, engine, 2, 1)
    for odd in (replace(base, slot_bytes=8192 + base.slot_bytes), replace(base, count=0)):
        odd.file.closed = False
        assert store.add_base(odd) is None
        assert odd.file.closed
    store.close()


def test_how_many_come_together():
    sizes = [4096, MAX_READ_BYTES // 4, MAX_READ_BYTES // 4 + 4096, MAX_READ_BYTES, 10**8]
    assert [together_of(size) for size in sizes] == [4, 4, 2, 1, 1]
    assert shadow_bytes(SPEC) <= MAX_READ_BYTES // 4 < MAX_READ_BYTES < shadow_bytes(LARGE)
