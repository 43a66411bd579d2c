# SPDX-License-Identifier: Apache-2.0
"""Rows that land beside their caller are those that land while it waits."""

import gc
import os
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SKIP, kernel_permits_rings
from landings import CONTENT_BYTES, file_of, random_content, rows_of, sums_of_file, wanted_rows
from waiting import until

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.engine_table import open_engine
from hillinfer.drive.files import probe_io_mode
from hillinfer.drive.read_engines import lander_of
from hillinfer.errors import ColdPoolError
from hillinfer.native.library import native_library
from hillinfer.settings import IOChoice

ROW_BYTES = 768
KINDS = [
    IOChoice.THREADS,
    pytest.param(IOChoice.URING, marks=pytest.mark.skipif(not kernel_permits_rings(), reason=SKIP)),
]


class Opened:
    def __init__(self, directory, choice, calls=None):
        self.content = random_content()
        self.file = file_of(directory, probe_io_mode(directory), self.content, calls)
        self.sums = sums_of_file(self.content, ROW_BYTES)
        self.engine = open_engine(choice, 4, calls or DriveCalls())
        self.lander = lander_of(self.engine)

    def wanted(self, seed, count=200, buffer_bytes=1 << 17):
        rows = np.random.default_rng(seed).permutation(CONTENT_BYTES // ROW_BYTES)[:count]
        wanted = wanted_rows(rows, ROW_BYTES, buffer_bytes, self.sums, seed)
        return replace(wanted, unit_bytes=self.file.read_unit)

    def close(self):
        if self.lander is not None:
            self.lander.close()
        self.engine.close()
        self.file.close()


@pytest.fixture(params=KINDS)
def opened(request, cold_dir):
    with closing(Opened(cold_dir, request.param)) as made:
        yield made


def test_rows_in_line_are_those_of_the_engine(opened):
    """Several landings stand in line, of many batches each, through one buffer."""
    asked = [opened.wanted(seed, buffer_bytes=20_000) for seed in range(4)]
    asked = [replace(one, buffer=asked[0].buffer) for one in asked]
    ahead = [opened.lander.ahead(opened.file, one) for one in asked]
    for one in ahead:
        one.begin()
    # In any order, and more than once.
    found = [one.result() for one in reversed(ahead)][::-1]
    assert [one.result() for one in ahead] == found
    for number, (wanted, landed) in enumerate(zip(asked, found, strict=True)):
        again = opened.wanted(number, buffer_bytes=20_000)
        assert opened.engine.land(opened.file, again) == landed
        assert np.array_equal(again.out, wanted.out)
        rows = rows_of(opened.content, ROW_BYTES)[wanted.rows]
        assert np.array_equal(wanted.out[wanted.places], rows)
        started, stopped = ahead[number].times
        assert 0 < started <= stopped <= time.perf_counter_ns()
    # The twin: other rows are others.
    assert not np.array_equal(asked[0].out, asked[1].out)


def test_rows_that_are_waited_for_come_before_those_under_way(opened):
    """Between two batches of a long landing, which goes on where it was; both are whole."""
    # A busy machine may let the long one end before the other begins.
    for _ in range(50):
        long, urgent = opened.wanted(1, count=2000, buffer_bytes=12_288), opened.wanted(2, count=3)
        behind = opened.wanted(3)
        ahead = [opened.lander.ahead(opened.file, one) for one in (long, behind, urgent)]
        for one in ahead[:2]:
            one.begin()
        until(lambda begun=ahead[0]: begun.times[0])
        ahead[2].begin_first()
        found = [one.result() for one in ahead]
        stopped = [one.times[1] for one in ahead]
        if stopped[2] < stopped[0]:
            break
    assert stopped[2] < stopped[0] < stopped[1]
    for wanted, landed in zip((long, behind, urgent), found, strict=True):
        rows = rows_of(opened.content, ROW_BYTES)[wanted.rows]
        assert np.array_equal(wanted.out[wanted.places], rows)
        assert landed.wrong is None
    # The twin: in line it comes behind them.
    again = [opened.wanted(1, count=2000, buffer_bytes=12_288), opened.wanted(2, count=3)]
    ahead = [opened.lander.ahead(opened.file, one) for one in again]
    for one in ahead:
        one.begin()
    # It gave way and lost nothing: as many reads, and as many bytes.
    assert ahead[0].result() == found[0]
    assert ahead[1].result() == found[2]
    assert ahead[0].times[1] < ahead[1].times[1]


def test_what_is_held_stands_still_until_somebody_waits(opened):
    wanted = [opened.wanted(seed) for seed in range(3)]
    ahead = [opened.lander.ahead(opened.file, one) for one in wanted]
    opened.lander.hold()
    ahead[0].begin()
    time.sleep(0.05)
    assert ahead[0].times == (0, 0)
    # What is waited for is not held back by anything.
    ahead[1].begin_first()
    assert ahead[1].result().wrong is None
    assert ahead[0].result().wrong is None
    ahead[2].begin()
    time.sleep(0.05)
    assert ahead[2].times == (0, 0)
    opened.lander.go_on()
    until(lambda: ahead[2].times[1])
    for one, landing in zip(wanted, ahead, strict=True):
        landing.settle()
        rows = rows_of(opened.content, ROW_BYTES)[one.rows]
        assert np.array_equal(one.out[one.places], rows)


def test_a_row_that_changed_is_told(opened):
    wanted = opened.wanted(3)
    wanted.sums[wanted.rows[11]] ^= 1
    ahead = opened.lander.ahead(opened.file, wanted)
    ahead.begin()
    assert ahead.result().wrong == 11


def test_a_row_without_a_place_is_refused(opened):
    wanted = opened.wanted(3)
    ahead = opened.lander.ahead(opened.file, replace(wanted, places=wanted.places + 10_000))
    ahead.begin()
    with pytest.raises(IndexError):
        ahead.result()


def test_what_does_not_come_is_read_anew_or_told(opened):
    first = opened.wanted(4)
    os.ftruncate(opened.file.descriptor, CONTENT_BYTES // 2)
    ahead = opened.lander.ahead(opened.file, first)
    ahead.begin()
    with pytest.raises(ColdPoolError, match="could not read"):
        ahead.result()


def test_what_nobody_waits_for_has_its_memory_until_it_is_there(opened):
    """Whoever began forgets it, and the thread ends with what stands in line."""
    out = []
    for seed in range(6):
        wanted = opened.wanted(seed)
        ahead = opened.lander.ahead(opened.file, wanted)
        ahead.begin()
        out.append((wanted.out, wanted.places, wanted.rows))
        del ahead, wanted
    gc.collect()
    opened.lander.close()
    for memory, places, rows in out:
        assert np.array_equal(memory[places], rows_of(opened.content, ROW_BYTES)[rows])
    # Nobody waits for what never began.
    opened.lander = lander_of(opened.engine)
    opened.lander.ahead(opened.file, opened.wanted(9)).settle()


def test_what_landed_before_its_thread_ended_is_told_afterwards(opened, monkeypatch):
    ahead = opened.lander.ahead(opened.file, opened.wanted(5))
    ahead.begin()
    opened.lander.close()
    asked, functions = [], native_library().functions
    wait = functions.hillinfer_lander_wait
    waits = False

    def asking(*given):
        asked.append(given)
        return wait(*given) if waits else None

    monkeypatch.setattr(functions, "hillinfer_lander_wait", asking)
    ahead.settle()
    assert ahead.result() == opened.engine.land(opened.file, opened.wanted(5))
    # The thread is gone, and nobody may ask it.
    assert not asked
    # The twin: what is under way is waited for.
    waits = True
    opened.lander = lander_of(opened.engine)
    other = opened.lander.ahead(opened.file, opened.wanted(6))
    other.begin()
    other.settle()
    assert len(asked) == 1


def test_who_looks_at_reads_sees_them_in_its_own_thread(cold_dir):
    class Seen(DriveCalls):
        def land(self, *given):
            return super().land(*given)

    with closing(Opened(cold_dir, IOChoice.THREADS, Seen())) as made:
        assert made.lander is None
    # The twin: calls that look at nothing.
    with closing(Opened(cold_dir, IOChoice.THREADS)) as made:
        assert made.lander is not None
