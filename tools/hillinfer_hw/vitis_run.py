# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a build, keeps what they print, and stops at the line that says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from hillinfer_hw.vitis_failures import Failure, cause_line, failure_line, silent_failure_line
from hillinfer_hw.vitis_flow import Step

_MOST_LOG_BYTES = 64 << 20
_END_SECONDS = 10


class BuildFailedError(RuntimeError):
    """A build that ended without a usable xclbin; the message has the tool's own line."""


def run_steps(steps: Sequence[Step], folder: Path, echo: TextIO) -> None:
    """Run steps in their order and stop at the first that fails.

    Parameters
    ----------
    steps
        Of one build.
    folder
        The build folder, with everything rendered.
    echo
        Where the tools' output is shown as it comes; it is kept in the logs as well.

    Raises
    ------
    BuildFailedError
        Where a tool fails, leaves an output out, or warns of what makes its result useless.
    """
    for step in steps:
        run_step(step, folder, echo)


def run_step(step: Step, folder: Path, echo: TextIO) -> None:
    """Run one step; parameters and errors as for `run_steps`."""
    absent = [name for name in step.inputs if not (folder / name).is_file()]
    if absent:
        raise BuildFailedError(f"{step.name}: {folder / absent[0]} is missing")
    for name in step.outputs:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # An output of an earlier run must not pass for one of this run.
        (folder / name).unlink(missing_ok=True)
    log = folder / step.log
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"[{step.name}] {step.line}", file=echo, flush=True)
    status = _run(step, folder, log, echo)
    check_log(step, folder, status)
    absent = [name for name in step.outputs if not (folder / name).is_file()]
    if absent:
        raise BuildFailedError(
            f"{step.name}: {step.command[0]} ended well, but {folder / absent[0]} is not there "
            f"(log: {log})"
        )


def check_log(step: Step, folder: Path, status: int) -> None:
    """Raise BuildFailedError where a step's log says that its result is of no use.

    Parameters
    ----------
    step, folder
        As for `run_steps`.
    status
        What the command ended with.
    """
    log = folder / step.log
    text = _text(log)
    if status == 0:
        found = silent_failure_line(text)
    else:
        found = failure_line(text)
        if found is None or found[0] is Failure.ERROR:
            found = _deeper_line(_inner_logs(step, folder)) or found
    if found is not None:
        raise BuildFailedError(f"{step.name}: {found[0]}:\n  {found[1]}\n(log: {log})")
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
        last = text.strip().splitlines()[-1:] or ["it printed nothing"]
        raise BuildFailedError(f"{step.name}: {step.command[0]} {how}:\n  {last[0]}\n(log: {log})")


def _run(step: Step, folder: Path, log: Path, echo: TextIO) -> int:
    """Run a command in a session of its own, so that its children can be ended with it."""
    with log.open("w", encoding="utf-8") as kept:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise BuildFailedError(
                f"{step.name}: cannot start {step.command[0]}: {error.strerror}"
            ) from error
        try:
            if process.stdout is not None:
                for line in process.stdout:
                    kept.write(line)
                    kept.flush()
                    echo.write(line)
            return process.wait()
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


def _inner_logs(step: Step, folder: Path) -> list[Path]:
    """Return the logs that the tools below a tool left, the innermost last."""
    found: set[Path] = set()
    for place in (f"logs/{step.name}", f"temp/{step.name}"):
        found |= {path for path in (folder / place).rglob("*.log") if path.is_file()}
    return sorted(found, key=lambda path: (len(path.parts), path))


def _deeper_line(logs: Iterable[Path]) -> tuple[Failure, str] | None:
    """Return the first line that names overflow or timing."""
    for log in logs:
        found = cause_line(_text(log))
        if found is not None:
            return found
    return None


def _text(log: Path) -> str:
    """Return the end of a log, which is where a failed run says why."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
