# SPDX-License-Identifier: Apache-2.0
"""Limits are what drive and memory allow at best, and rates the best that was found."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hillinfer.native.library import native_library
from hillinfer_bench.decode.rates import RateProbe, fastest_reader, held_rate, memory_readers
from hillinfer_bench.report.rows import Limit, MachineRates, is_beaten
from hillinfer_bench.systems.system import Counted

RATES = MachineRates(memory=10e9, drive=1e9)


@pytest.mark.parametrize(
    ("drive_mb", "memory_mb", "overlapped", "serial"), [(100, 200, 100, 140), (10, 600, 80, 90)]
)
def test_a_step_takes_as_long_as_the_slower_of_drive_and_memory(
    drive_mb, memory_mb, overlapped, serial
):
    counted = Counted(4 * drive_mb * 10**6, 0, 4 * memory_mb * 10**6, 0)
    limit = Limit.of(counted, 4, 200 * 10**6, RATES)
    assert limit.overlapped_ms == pytest.approx(overlapped)
    assert limit.serial_ms == pytest.approx(serial)


def test_each_read_takes_its_time_beside_its_bytes():
    """What scattered rows are limited by: as many bytes in few long reads take less."""
    rates = replace(RATES, scattered=((4096, 15e-6), (16_384, 26.384e-6)))
    assert rates.read_seconds == pytest.approx(1e-5)
    scattered, long = (
        Limit.of(Counted(4 * 10**8, 0, 0, 0, drive_reads=4 * reads), 4, 0, rates).drive_ms
        for reads in (25_000, 400)
    )
    assert scattered == pytest.approx(100 + 250)
    assert long == pytest.approx(100 + 4)


def test_reads_that_come_at_the_full_rate_take_nothing_beside_their_bytes():
    """A drive with so many reads a second: what small ones take says nothing of longer ones."""
    assert replace(RATES, scattered=((4096, 10e-6), (65_536, 65.5e-6))).read_seconds == 0
    assert replace(RATES, scattered=((4096, 10e-6),)).read_seconds == pytest.approx(5.904e-6)
    assert RATES.read_seconds == 0


def test_a_step_that_reads_faster_shows_the_drives_rate():
    assert RATES.shown_by_step(5 * 10**8, 250.0).drive == pytest.approx(2e9)
    assert RATES.shown_by_step(10**8, 250.0) == RATES


def test_a_floor_step_that_reads_weights_faster_shows_the_rate():
    assert RATES.shown_by_floor(4 * 10**9, 200.0).memory == pytest.approx(20e9)
    assert RATES.shown_by_floor(4 * 10**9, 500.0) == RATES


def test_no_floor_step_beats_its_own_limit():
    shown = RATES.shown_by_floor(3_220_000_000, 185.0)
    limit = Limit.of(Counted(0, 0, 0, 0), 1, 3_220_000_000, shown)
    assert not is_beaten(limit.overlapped_ms, 185.0)
    # As it was with the rate of the start alone.
    assert is_beaten(Limit.of(Counted(0, 0, 0, 0), 1, 3_220_000_000, RATES).overlapped_ms, 185.0)


def test_memory_is_read_in_every_way_there_is():
    memory = np.ones(4 * 4096, np.float32)
    memory[:4096] = 3
    readers = memory_readers(memory)
    assert {"linear float32", "linear bfloat16"} <= set(readers)
    assert readers["linear float32"]().tolist() == [[3 * 4096, 4096, 4096, 4096]]
    variants = native_library().variants
    assert {f"native {one.value}" for one in variants} <= set(readers)
    whole = int(memory.view(np.uint64).sum(dtype=np.uint64))
    assert {readers[f"native {one.value}"]() for one in variants} == {whole}


@pytest.mark.parametrize("fastest", ["one", "two", "three"])
def test_the_rate_is_that_of_the_fastest_way_in_its_fastest_round(fastest):
    clock = SimpleNamespace(now=0.0, calls=0)

    def reader(name):
        def read():
            clock.calls += 1
            # Every way is slow at first.
            quick = name == fastest and clock.calls > 3
            clock.now += 0.5 if quick else 1.0

        return read

    readers = {name: reader(name) for name in ("one", "two", "three")}
    found = fastest_reader(readers, 1 << 20, 0.5, clock=lambda: clock.now)
    assert found == (fastest, pytest.approx((1 << 20) / 0.5))


@pytest.mark.parametrize(("seconds", "reads"), [(0, 1), (1, 1), (3, 1), (3.5, 3), (5, 3), (9, 5)])
def test_a_moment_does_not_make_memorys_rate(seconds, reads):
    """It is what all reads of a while have together, the slow first and the quick second one."""
    clock = SimpleNamespace(now=0.0, calls=0)
    takes = [3, 0.1, 1.9, 2, 2, 2]

    def read():
        clock.now += takes[clock.calls]
        clock.calls += 1

    found = held_rate(itertools.repeat(read), 100, seconds, lambda: clock.now)
    assert clock.calls == reads
    assert found == pytest.approx(100 * reads / sum(takes[:reads]))
    assert found < 100 / min(takes)


def test_rates_are_measured_at_the_start_and_as_often_as_asked(cold_dir):
    threads = torch.get_num_threads()
    with RateProbe(cold_dir, 1 << 20, 100 << 20, cache_bytes=0) as probe:
        found = [probe.start, *(probe.sample() for _ in range(5))]
    assert all(one.memory > 0 and one.drive > 0 for one in found)
    assert torch.get_num_threads() == threads
    assert list(cold_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("cache_kib", "parts"), [(0, [0, 1, 0, 1]), (512, [0, 1, 0, 1]), (1024, [0, 1, 2, 3])]
)
def test_a_short_measurement_reads_what_the_one_before_did_not(cold_dir, cache_kib, parts):
    sizes = {"memory_bytes": 2 << 20, "part_bytes": 1 << 20, "cache_bytes": cache_kib << 10}
    read = []

    def readers(memory):
        return {"notes": lambda: read.append((memory.ctypes.data, memory.nbytes))}

    with RateProbe(
        cold_dir, drive_bytes=33 << 20, readers=readers, **sizes, held_seconds=0
    ) as probe:
        (whole,) = set(read)
        read.clear()
        assert all(probe.sample().memory > 0 for _ in parts)
    assert whole[1] == max(2 << 20, 4 * sizes["cache_bytes"])
    assert read == [(whole[0] + part * sizes["part_bytes"], sizes["part_bytes"]) for part in parts]


def test_the_best_rates_are_of_memory_and_drive_apart():
    start = MachineRates(10.0, 3.0, ((8, 6.0),))
    others = [MachineRates(9.0, 4.0, ((8, 5.0),)), MachineRates(11.0, 1.0, ((8, 7.0), (9, 1.0)))]
    assert start.best_of(others) == MachineRates(11, 4, ((8, 5.0), (9, 1.0)))
    assert start.best_of([]) == start


def test_the_middle_rates_are_medians_of_each_apart():
    """A moment that one measurement met moves the best, and not the middle."""
    samples = [
        MachineRates(10.0, 3.0, ((8, 6.0), (9, 2.0))),
        MachineRates(60.0, 2.0, ((8, 5.0), (9, 1.0))),
        MachineRates(9.0, 9.0, ((8, 7.0), (9, 3.0))),
    ]
    assert MachineRates.middle_of(samples) == MachineRates(10.0, 3.0, ((8, 6.0), (9, 2.0)))
    assert samples[0].best_of(samples) == MachineRates(60.0, 9.0, ((8, 5.0), (9, 1.0)))
    assert MachineRates.middle_of(samples[1:2]) == samples[1]
