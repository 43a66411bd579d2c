# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about an xclbin and the card that it is for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hillinfer.devices.xrt.environment import Deadlines, deadlines_of, environment_of
from hillinfer.devices.xrt.worker_process import WorkerProcess
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin, XclbinError, check_xclbin, recorded_spec
from hillinfer.doctor.finding import Finding, Verdict
from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.directories import prepared_cold_dir
from hillinfer.drive.files import ColdFile, IOMode, aligned_buffer, probe_io_mode
from hillinfer.errors import DeviceError, HillInferError
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import KernelSpec

# --- P2P reads by their size ---

BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
# Small reads are slow, and a few of them tell as much.
_READS = 256
_LARGEST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class CurvePoint:
    """Reads of one size.

    Parameters
    ----------
    block_bytes
        Bytes per read.
    bytes_per_second
        With a few reads at once, as launches have them.
    """

    block_bytes: int
    bytes_per_second: float


def read_curve(worker: WorkerProcess, file: ColdFile, seconds: float) -> Iterator[CurvePoint]:
    """Yield a point per size of reads, after a look at whether the bytes arrive.

    Parameters
    ----------
    worker
        With an opened card, and a window of at least 1 MiB.
    file
        An empty one; it is written first.
    seconds
        In which each answer of the worker must come.

    Raises
    ------
    DeviceError
        Where the card has no memory for it, fails, or holds other bytes than the file.
    ColdPoolError
        Where the drive fails.
    """
    answer = worker.ask("chunk", seconds, size=_LARGEST_BYTES)
    if "full" in answer:
        raise DeviceError(f"the card gives no memory that a drive can reach: {answer['full']}")
    # Drives may be faster with zeros.
    piece = aligned_buffer(_PIECE_BYTES)
    piece[:] = np.random.default_rng(0).integers(0, 256, piece.nbytes, np.uint8)
    for number in range(_LARGEST_BYTES // piece.nbytes):
        # Each piece is another, so that one in the place of another shows.
        piece[0] = number
        file.write(piece.data, number * piece.nbytes)
    _load(worker, file, seconds, _LARGEST_BYTES, _PIECE_BYTES)
    # Reading a card's memory over the bus is slow, so only the last piece is looked at.
    start = _LARGEST_BYTES - piece.nbytes
    worker.ask("read", seconds, chunk=0, offset=start, at=0, size=piece.nbytes)
    if not np.array_equal(worker.window[: piece.nbytes], piece):
        raise DeviceError("the card's memory does not hold what was read from the drive")
    for block in BLOCKS:
        size = min(_LARGEST_BYTES, block * _READS)
        began = time.perf_counter()
        _load(worker, file, seconds, size, block)
        yield CurvePoint(block, size / (time.perf_counter() - began))


def _load(worker: WorkerProcess, file: ColdFile, seconds: float, size: int, block: int) -> None:
    worker.ask(
        "load", seconds, [file.descriptor],
        parts=[[0, 0, 0, 0]], size=size, block=block,
    )  # fmt: skip


# --- Findings ---

_WINDOW_BYTES = 1 << 20
Starter = Callable[[Mapping[str, str], int, float], WorkerProcess]


def xclbin_findings(
    path: Path,
    cold_dir: Path | None,
    deadlines: Deadlines | None = None,
    calls: DriveCalls | None = None,
    start: Starter = WorkerProcess,
) -> Iterator[Finding]:
    """Check an image, load it on its card, and time reads from the drive into the card's memory.

    Parameters
    ----------
    path
        The image.
    cold_dir
        Directory on the drive; None for the default one.
    deadlines
        How long to wait for the card; None for what a run waits.
    calls
        How the drive is reached; the operating system itself where None.
    start
        Starts the process that has the card.
    """
    try:
        xclbin = Xclbin.read(path)
        spec = recorded_spec(xclbin, str(path))
        check_xclbin(xclbin, spec, xclbin.platform, str(path))
    except XclbinError as error:
        yield Finding("xclbin", Verdict.WARNING, "unusable", str(error))
        return
    yield Finding(
        "xclbin", Verdict.OK,
        f"{spec.key_mode} {spec.rule}, heads of {spec.head_dim}, {spec.kv_heads} KV heads, "
        f"{spec.group_size} query heads each, for {xclbin.platform}; sections and spec hash "
        f"{spec.digest().hex()[:16]} as built",
    )  # fmt: skip
    yield from _tried(path, xclbin, spec, cold_dir, deadlines, calls or DriveCalls(), start)


def _tried(
    path: Path,
    xclbin: Xclbin,
    spec: KernelSpec,
    cold_dir: Path | None,
    deadlines: Deadlines | None,
    calls: DriveCalls,
    start: Starter,
) -> list[Finding]:
    """Open the card; no process of it is left when this returns."""
    name = "xclbin on its card"
    try:
        environment = environment_of(path)
        wait = deadlines or deadlines_of(xclbin, {**os.environ, **environment})
        worker = start(environment, _WINDOW_BYTES, wait.load)
        with closing(worker):
            card = worker.ask("open", wait.load, xclbin=str(path.resolve()), index=0)
            check_xclbin(xclbin, spec, str(card["name"]), str(path))
            emulated = " (emulated)" if xclbin.mode == HW_EMU else f" at {card['place']}"
            memory = format_bytes(int(card["memory_bytes"]))
            opened = Finding(name, Verdict.OK, f"{card['name']}{emulated}, {memory}")
            return [opened, _curve(worker, xclbin, cold_dir, wait.answer, calls)]
    except HillInferError as error:
        return [Finding(name, Verdict.WARNING, "unusable", str(error))]


def _curve(
    worker: WorkerProcess,
    xclbin: Xclbin,
    cold_dir: Path | None,
    seconds: float,
    calls: DriveCalls,
) -> Finding:
    name = "P2P read curve"
    try:
        folder = prepared_cold_dir(cold_dir)
        mode = probe_io_mode(folder, calls)
        with closing(ColdFile(folder, mode, "a file to time", calls)) as file:
            points = [
                f"{format_bytes(point.block_bytes)} {point.bytes_per_second / 1e9:.2f} GB/s"
                for point in read_curve(worker, file, seconds)
            ]
    except HillInferError as error:
        return Finding(name, Verdict.WARNING, "not measured", str(error))
    found = ", ".join(points)
    if xclbin.mode == HW_EMU:
        return Finding(name, Verdict.OK, f"{found} (not a card's: into this machine's memory)")
    if mode is IOMode.BUFFERED:
        fix = f"{folder} does not allow direct I/O: choose another directory with --cold-dir"
        return Finding(name, Verdict.WARNING, f"{found} (through the page cache, no P2P)", fix)
    return Finding(
        name, Verdict.OK,
        f"{found} from {folder} straight into the card's memory, measured now; a run measures "
        "its own reads and goes on with the best size",
    )  # fmt: skip
