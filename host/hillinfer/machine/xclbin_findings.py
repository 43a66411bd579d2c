# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor` says about an xclbin and the card that it is for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from hillinfer.byte_size import format_bytes
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.devices.xrt.deadlines import Deadlines, deadlines_of
from hillinfer.devices.xrt.environment import environment_of
from hillinfer.devices.xrt.errors import XclbinError
from hillinfer.devices.xrt.spec_record import check_xclbin, recorded_spec
from hillinfer.devices.xrt.worker_process import WorkerProcess
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.errors import HillInferError
from hillinfer.machine.finding import Finding, Verdict
from hillinfer.machine.read_curve import read_curve
from hillinfer.storage.cold_file import ColdFile, IOMode, probe_io_mode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer_model.kernel_spec import KernelSpec

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
