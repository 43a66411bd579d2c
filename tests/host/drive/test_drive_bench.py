# SPDX-License-Identifier: Apache-2.0
"""`make drive`: what it counts, what it checks, and the reference that it compares with."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from build_native import BuildError
from drive_bench import (
    CASES,
    WAYS,
    Pace,
    PlainEngine,
    build_reference,
    engine_pace,
    reference_pace,
    summary,
)
from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, aligned_buffer, probe_io_mode

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
    paces = {"reference": [Pace(1e6, 1), Pace(4e6, 1)], "uring": [Pace(1e6, 0.5), Pace(2e6, 0.5)]}
    found = summary(paces)
    assert found["uring"]["ratio_to_reference"] == 0.75
    assert found["uring"]["min_ratio_to_reference"] == 0.5
    assert found["uring"]["median_mb_per_second"] == 1.5
    assert found["reference"]["ratio_to_reference"] == 1


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_bytes_that_came_are_counted(file, case):
    pace = engine_pace(PlainEngine(), file, case, 2, 0.01, FILE_BYTES)
    assert pace.bytes_per_second > 0


class Wrong(PlainEngine):
    """Flips a bit of the last thing that it brings."""

    def read(self, file, buffer, reads):
        super().read(file, buffer, reads)
        buffer[int(reads.buffer_offsets[-1]) + 5] ^= 1

    def land(self, file, wanted):
        landed = super().land(file, wanted)
        wanted.out[wanted.places[-1], 5] ^= 1
        return landed


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_an_engine_that_brings_other_bytes_ends_it(file, case):
    with pytest.raises(SystemExit, match="has other bytes than the file"):
        engine_pace(Wrong(), file, case, 2, 0.01, FILE_BYTES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return build_reference(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("case", CASES[2:4], ids=lambda case: case.name)
def test_the_reference_reads_in_its_faster_way(file, reference, tmp_path, case):
    if probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"{tmp_path} has no direct I/O")
    path = Path(f"/proc/{os.getpid()}/fd/{file.descriptor}")
    pace = reference_pace(reference, path, FILE_BYTES, case, 4, 0.05)
    assert pace.bytes_per_second > 0
    assert pace.processor_share > 0


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_counts_what_it_reads_and_tells_of_a_short_file(tmp_path, reference, way):
    if probe_io_mode(tmp_path) is not IOMode.DIRECT:
        pytest.skip(f"{tmp_path} has no direct I/O")
    short = tmp_path / "short"
    short.write_bytes(bytes(4 * PAGE_BYTES))

    def read(file_bytes):
        given = (way, short, file_bytes, PAGE_BYTES, 4, 0.05, 1)
        return subprocess.run([reference, *map(str, given)], capture_output=True, text=True)

    found = read(4 * PAGE_BYTES)
    if found.returncode == 3:
        pytest.skip(f"no io_uring here: {found.stderr}")
    told = json.loads(found.stdout)
    assert told["bytes"] > 0
    assert told["bytes"] % PAGE_BYTES == 0
    beyond = read(64 * PAGE_BYTES)
    assert (beyond.returncode, beyond.stderr) == (1, "read came short: Input/output error\n")


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler on PATH: apt install g\+\+"):
        build_reference(tmp_path)
