# SPDX-License-Identifier: Apache-2.0
"""`make drive`: measures how fast HillInfer reads a drive, beside a reference reader.

Every contender reads the same file at random places with the same sizes, in turns, because drives
and neighbours change their pace. Each read engine works as the runtime uses it: batch after batch,
a batch complete before the next begins. The reference (`tools/reference_reader.cpp`, a program of
its own) never pauses and looks at no byte. fio is measured beside it where it is installed, and the
ring once more with buffers in small pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_native import BuildError, find_compiler
from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.drive.directories import filesystem_of
from hillinfer.drive.engine_table import DEPTH, UringEngine, open_engine, why_no_ring
from hillinfer.drive.files import (
    PAGE_BYTES,
    ColdFile,
    IOMode,
    aligned_buffer,
    private_memory,
    probe_io_mode,
    round_up,
)
from hillinfer.drive.landing import FileRows, Landed
from hillinfer.drive.read_engines import ReadEngine
from hillinfer.settings import IOChoice
from hillinfer.system.machine import ProcessorFacts
from hillinfer.trace.recorder import ReadCost

GOAL = 0.8
REFERENCE = "reference"
# How the reference may read: which is faster differs between kernels and drives.
WAYS = ("ring", "threads")
_NO_RING = 3
_SOURCE = Path(__file__).with_name("reference_reader.cpp")
BLOCK_ROWS = 512
PIECE_BYTES = 4 << 20
# Another place each time would cost the contender what the reference makes in no time.
BATCHES = 64
ROWS = (1 << 10, 2 << 10, 4 << 10)
BLOCKS = (64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True)
class Case:
    """What is read: scattered rows, brought to their places as the runtime does it, or blocks.

    Parameters
    ----------
    name
        For the report.
    read_bytes
        Bytes of each read, which the reference makes, too.
    row_bytes
        Bytes of a row; 0 for blocks.
    """

    name: str
    read_bytes: int
    row_bytes: int = 0

    def batch_reads(self, depth: int) -> int:
        """Return how many reads are made before the next batch begins."""
        return BLOCK_ROWS if self.row_bytes else 2 * depth

    def places(self, file_bytes: int, depth: int, chance: np.random.Generator) -> NDArray[np.int64]:
        """Return random places of a batch: numbers of rows, one per page at most, or of blocks."""
        numbers = chance.integers(0, file_bytes // self.read_bytes, self.batch_reads(depth))
        return (
            np.unique(numbers) * (self.read_bytes // self.row_bytes) if self.row_bytes else numbers
        )

    def turn(
        self, engine: ReadEngine, file: ColdFile, depth: int, memory: Memory = aligned_buffer
    ) -> Turn:
        """Return what reads a batch at given places and returns how many bytes came."""
        most = self.batch_reads(depth)
        # Joined reads bring some bytes more.
        buffer = memory(2 * most * self.read_bytes)
        if not self.row_bytes:
            return partial(self._blocks, engine, file, buffer)
        out = np.zeros((most, self.row_bytes), np.uint8)
        return partial(self._rows, engine, file, buffer, out)

    def _rows(
        self,
        engine: ReadEngine,
        file: ColdFile,
        buffer: NDArray[np.uint8],
        out: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> Came:
        landed = engine.land(file, FileRows(places, out, np.arange(len(places)), buffer))
        return Came(landed.cost.byte_count, out[: len(places)])

    def _blocks(
        self,
        engine: ReadEngine,
        file: ColdFile,
        buffer: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> Came:
        size = self.read_bytes
        starts = np.arange(len(places)) * size
        engine.read(file, buffer, Reads(places * size, starts, np.full(len(places), size)))
        came = buffer[: len(places) * size]
        return Came(len(came), came.reshape(-1, size))


@dataclass(frozen=True)
class Came:
    """What a batch brought.

    Parameters
    ----------
    byte_count
        Bytes that came from the drive.
    pieces
        uint8 (rows or blocks, bytes).
    """

    byte_count: int
    pieces: NDArray[np.uint8]


Turn = Callable[[NDArray[np.int64]], Came]
Memory = Callable[[int], NDArray[np.uint8]]


def small_pages(byte_count: int) -> NDArray[np.uint8]:
    """Return a buffer as `aligned_buffer` does, of which nothing lies in huge pages."""
    return np.frombuffer(private_memory(byte_count), np.uint8)


CASES = (
    *(Case(f"rows of {size >> 10} KiB", 4096, size) for size in ROWS),
    *(Case(f"{size >> 10} KiB", size) for size in BLOCKS),
)


class PlainEngine:
    """A `ReadEngine` that makes one read after the other."""

    name, in_library = "one by one", None

    def read(self, file: ColdFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads."""
        for i in range(len(reads)):
            at, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
            file.read(buffer[at : at + count].data, int(reads.file_offsets[i]))

    def land(self, file: ColdFile, wanted: FileRows) -> Landed:
        """Read the pages of each row by themselves."""
        count, size = 0, wanted.row_bytes
        for row, place in zip(wanted.rows.tolist(), wanted.places.tolist(), strict=True):
            first = row * size // PAGE_BYTES * PAGE_BYTES
            last = round_up((row + 1) * size, PAGE_BYTES)
            file.read(wanted.buffer[: last - first].data, first)
            wanted.out[place] = wanted.buffer[row * size - first :][:size]
            count += last - first
        return Landed(ReadCost(len(wanted.rows), count), None)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Pace:
    """What a contender did in one turn.

    Parameters
    ----------
    bytes_per_second
        Bytes that came from the drive.
    processor_share
        Processor time over time, in processors.
    """

    bytes_per_second: float
    processor_share: float


def build_reference(folder: Path) -> Path:
    """Compile the reference reader into a folder and return its path.

    Raises
    ------
    BuildError
        Where there is no compiler, or it refuses.
    """
    program = folder / "reference_reader"
    command = [find_compiler(), "-std=c++17", "-O2", "-pthread", str(_SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return program


def reference_pace(
    program: Path, path: Path, file_bytes: int, case: Case, depth: int, seconds: float
) -> Pace:
    """Return what the reference reaches in the faster of its ways, one after the other.

    Parameters
    ----------
    program
        From `build_reference`.
    path, file_bytes
        The file, and how much of it is read.
    case
        Says how long reads are.
    depth, seconds
        Reads in flight, and the time that each way takes.
    """
    paces = []
    for way in WAYS:
        given = (path, file_bytes, case.read_bytes, depth, seconds, time.time_ns())
        done = subprocess.run(
            [str(program), way, *map(str, given)], capture_output=True, text=True, check=False
        )
        if done.returncode == _NO_RING:
            continue
        if done.returncode:
            sys.exit(f"the reference reader ({way}) failed: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        share = found["processor_seconds"] / found["seconds"]
        paces.append(Pace(found["bytes"] / found["seconds"], share))
    return max(paces, key=lambda pace: pace.bytes_per_second)


def fio_pace(path: Path, case: Case, depth: int, seconds: float) -> Pace:
    """Return what fio reaches with io_uring."""
    command = [
        *("fio", "--name=read", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1"),
        *("--ioengine=io_uring", f"--bs={case.read_bytes}", f"--iodepth={depth}"),
        *("--norandommap", "--randrepeat=0", "--time_based", f"--runtime={seconds}"),
        *("--output-format=json", "--invalidate=0"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return Pace(job["read"]["bw_bytes"], (job["usr_cpu"] + job["sys_cpu"]) / 100)


def engine_pace(
    engine: ReadEngine,
    file: ColdFile,
    case: Case,
    depth: int,
    seconds: float,
    file_bytes: int,
    memory: Memory = aligned_buffer,
) -> Pace:
    """Return what an engine reaches, after a look at whether the bytes are the file's."""
    chance = np.random.default_rng()
    batches = [case.places(file_bytes, depth, chance) for _ in range(BATCHES)]
    read = case.turn(engine, file, depth, memory)
    _compare(file, case, batches[0], read(batches[0]).pieces)
    count = turn = 0
    worked, started = time.process_time(), time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        # Planning and copying are part of the work.
        count += read(batches[turn % BATCHES]).byte_count
        turn += 1
    return Pace(count / passed, (time.process_time() - worked) / passed)


def _compare(
    file: ColdFile, case: Case, places: NDArray[np.int64], pieces: NDArray[np.uint8]
) -> None:
    size = pieces.shape[1]
    right = aligned_buffer(max(size, PAGE_BYTES))
    for number, (place, came) in enumerate(zip(places.tolist(), pieces, strict=True)):
        inside = place * size % PAGE_BYTES
        file.read(right.data, place * size - inside)
        if not np.array_equal(right[inside : inside + size], came):
            sys.exit(f"{case.name}: piece {number} of {len(places)} has other bytes than the file")


def summary(paces: dict[str, list[Pace]]) -> dict[str, Any]:
    """Return least and median pace of each, and the median of its ratios to the reference."""
    found: dict[str, Any] = {}
    for name, turns in paces.items():
        speeds = [one.bytes_per_second for one in turns]
        ratios = [
            mine / one.bytes_per_second for mine, one in zip(speeds, paces[REFERENCE], strict=True)
        ]
        found[name] = {
            "min_mb_per_second": round(min(speeds) / 1e6, 1),
            "median_mb_per_second": round(median(speeds) / 1e6, 1),
            "processors": round(median(one.processor_share for one in turns), 2),
            "ratio_to_reference": round(median(ratios), 3),
            "min_ratio_to_reference": round(min(ratios), 3),
        }
    return found


def _write(file: ColdFile, file_bytes: int) -> None:
    # Drives may be faster with zeros.
    chance, piece = np.random.default_rng(0), aligned_buffer(PIECE_BYTES)
    for offset in range(0, file_bytes, PIECE_BYTES):
        piece[:] = chance.integers(0, 256, len(piece), np.uint8)
        file.write(piece.data, offset)


def _engines(depth: int, opened: ExitStack) -> dict[str, ReadEngine]:
    engines: dict[str, ReadEngine] = {}
    reason = why_no_ring(DriveCalls())
    if reason is None:
        engines["uring"] = UringEngine(depth, DriveCalls(), depth)
    else:
        print(f"no io_uring here: {reason}", file=sys.stderr)
    engines["threads"] = open_engine(IOChoice.THREADS, depth, DriveCalls())
    engines["preadv"] = PlainEngine()
    for engine in engines.values():
        opened.callback(engine.close)
    return engines


def main() -> None:
    """Measure every case in turns, write the report, and say where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/reports/drive.json"))
    parser.add_argument("--drive", type=Path, default=Path("build/drive"), help="directory on it")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument(
        "--depth", type=int, default=DEPTH, help="reads in flight, of all contenders"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a turn")
    chosen = parser.parse_args()
    chosen.drive.mkdir(parents=True, exist_ok=True)
    if probe_io_mode(chosen.drive) is not IOMode.DIRECT:
        sys.exit(f"{chosen.drive} does not allow direct I/O: choose another with --drive")
    file_bytes = round_up(int(chosen.gib * (1 << 30)), PIECE_BYTES)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        try:
            program = build_reference(folder)
        except BuildError as error:
            sys.exit(f"the reference reader was not built: {error}")
        file = ColdFile(chosen.drive, IOMode.DIRECT, "a file to read")
        opened.callback(file.close)
        _write(file, file_bytes)
        # The file has no name; this is the same one for another process.
        path = Path(f"/proc/{os.getpid()}/fd/{file.descriptor}")
        contenders: dict[str, Callable[[Case], Pace]] = {
            REFERENCE: lambda case: reference_pace(
                program, path, file_bytes, case, chosen.depth, chosen.seconds
            )
        }
        if shutil.which("fio") is not None:
            contenders["fio"] = lambda case: fio_pace(path, case, chosen.depth, chosen.seconds)
        engines = _engines(chosen.depth, opened)
        ways = [(name, engine, aligned_buffer) for name, engine in engines.items()]
        if "uring" in engines:
            ways.append(("small", engines["uring"], small_pages))
        for name, engine, memory in ways:
            contenders[name] = lambda case, engine=engine, memory=memory: engine_pace(
                engine, file, case, chosen.depth, chosen.seconds, file_bytes, memory
            )
        paces: dict[str, dict[str, list[Pace]]] = {
            case.name: {name: [] for name in contenders} for case in CASES
        }
        for turn in range(chosen.rounds):
            for case in CASES:
                # Another one begins each time, so that none has always the same neighbour.
                names = list(contenders)[turn % len(contenders) :]
                names += [name for name in contenders if name not in names]
                for name in names:
                    paces[case.name][name].append(contenders[name](case))
            print(f"round {turn + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
    report = {
        "goal_ratio_to_reference": GOAL,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "depth": chosen.depth,
        "reference": "tools/reference_reader.cpp, the faster of io_uring and threads in each turn",
        "rounds": chosen.rounds,
        "seconds_per_turn": chosen.seconds,
        "file_bytes": file_bytes,
        "filesystem": filesystem_of(chosen.drive),
        "processor": ProcessorFacts.read().name,
        "cores": ProcessorFacts.read().cores,
        "load": os.getloadavg(),
        "cases": {name: summary(one) for name, one in paces.items()},
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _show(report)


def _show(report: dict[str, Any]) -> None:
    print(
        f"{report['date']}, {report['file_bytes'] / (1 << 30):g} GiB on {report['filesystem']}, "
        f"depth {report['depth']}, {report['rounds']} turns of {report['seconds_per_turn']:g} s"
    )
    print(f"{'':16}{'':>10}{'min':>10}{'median':>10}{'of ref.':>8}{'CPUs':>6}")
    for name, contenders in report["cases"].items():
        for contender, one in contenders.items():
            print(
                f"{name:16}{contender:>10}{one['min_mb_per_second']:>10.1f}"
                f"{one['median_mb_per_second']:>10.1f}{one['ratio_to_reference']:>8.2f}"
                f"{one['processors']:>6.2f}"
            )
    best = "uring" if "uring" in next(iter(report["cases"].values())) else "threads"
    missed = [
        name for name, one in report["cases"].items() if one[best]["ratio_to_reference"] < GOAL
    ]
    print(f"MB/s. {best} below {GOAL:.0%} of the reference: {', '.join(missed) or 'nowhere'}")


if __name__ == "__main__":
    main()
