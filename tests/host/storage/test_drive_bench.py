# SPDX-License-Identifier: Apache-2.0
"""`make drive`: what it counts, what it checks, and what it says without fio."""

import sys

import numpy as np
import pytest

import drive_bench
from drive_bench import CASES, Pace, PlainEngine, engine_pace, summary
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer
from hillinfer.storage.cold_file import ColdFile, probe_io_mode

FILE_BYTES = 512 * PAGE_BYTES


@pytest.fixture
def file(tmp_path):
    made = ColdFile(tmp_path, probe_io_mode(tmp_path), "a file to read")
    data = aligned_buffer(FILE_BYTES)
    data[:] = np.random.default_rng(0).integers(0, 256, FILE_BYTES, np.uint8)
    made.write(data.data, 0)
    yield made
    made.close()


def test_ratios_are_taken_turn_by_turn():
    paces = {"fio": [Pace(1e6, 1), Pace(4e6, 1)], "uring": [Pace(1e6, 0.5), Pace(2e6, 0.5)]}
    found = summary(paces)
    assert found["uring"]["ratio_to_fio"] == 0.75
    assert found["uring"]["min_ratio_to_fio"] == 0.5
    assert found["uring"]["median_mb_per_second"] == 1.5
    assert found["fio"]["ratio_to_fio"] == 1


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_bytes_that_came_are_counted(file, case):
    pace = engine_pace(PlainEngine(), file, case, 2, 0.01, FILE_BYTES)
    assert pace.bytes_per_second > 0


def test_an_engine_that_brings_other_bytes_ends_it(file):
    class Wrong(PlainEngine):
        def read(self, file, buffer, reads):
            super().read(file, buffer, reads)
            buffer[int(reads.buffer_offsets[-1]) + 5] ^= 1

    with pytest.raises(SystemExit, match="brought other bytes than the file's"):
        engine_pace(Wrong(), file, CASES[0], 2, 0.01, FILE_BYTES)


def test_without_fio_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["drive_bench", "--drive", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"fio is missing: .*apt install fio"):
        drive_bench.main()
