# SPDX-License-Identifier: Apache-2.0
"""Servers as processes of their own, and ours among them."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_START_SECONDS, _END_SECONDS = 300.0, 60.0
_OWN = "from hillinfer_command import main; main()"
_MOST_TOLD = 400


class ServerError(Exception):
    """A server did not start; the message says what it wrote last."""


@dataclass(frozen=True)
class RunningServer:
    """A server that takes requests.

    Parameters
    ----------
    url
        Its address, without a path.
    model
        What clients call the model.
    process
        It.
    fields
        What each request has beside OpenAI's fields.
    log
        Where it writes what happens; None where nobody reads that.
    headers
        What each request has that is not about the model.
    """

    url: str
    model: str
    process: subprocess.Popen[str]
    fields: Mapping[str, object] = field(default_factory=dict)
    log: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def peak_bytes(self) -> int:
        """Most memory that its processes had so far, files that are mapped included.

        Each one's own most, so that of several it is no less than all had at once.
        """
        total = 0
        for process in _family(self.process.pid):
            # One that has just ended tells nothing.
            with suppress(OSError):
                status = Path(f"/proc/{process}/status").read_text()
                found = re.search(r"VmHWM:\s+(\d+) kB", status)
                total += int(found.group(1)) << 10 if found else 0
        return total


@contextmanager
def hillinfer_server(
    place: Path,
    model: str,
    parallel: int,
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    python: Sequence[str] = (sys.executable,),
) -> Iterator[RunningServer]:
    """Run `hillinfer serve` with a store that stays in `place` for the next one.

    Parameters
    ----------
    place
        Directory for store, cold pool and log.
    model
        As the command takes it.
    parallel
        Sequences that decode together.
    options
        More of the command; of an option that is given twice the last one counts.
    headers
        What requests need.
    python
        The interpreter, with options of its own.

    Raises
    ------
    ServerError
        Where it does not start.
    """
    cold = place / "cold"
    cold.mkdir(parents=True, exist_ok=True)
    # The budget is above all rows of all parts, so that no figure is the drive's.
    command = [*python, "-c", _OWN, "serve", "--port", "0", "--model", model]
    command += ["--alias", "bench", "--parallel", str(parallel), "--dram-budget", "2GiB"]
    command += ["--store", str(place / "store"), "--store-size", "8GiB", "--cold-dir", str(cold)]
    command += options
    log = place / "server.log"
    with server_process(command, log, subprocess.PIPE) as process:
        url = _announced(process, log)
        # Answers of one length: what is compared is time.
        fields = {"ignore_eos": True}
        yield RunningServer(url, "bench", process, fields, log, dict(headers or {}))


@contextmanager
def command_server(
    place: Path,
    name: str,
    program: str,
    options: Sequence[str],
    model: str,
    python: Sequence[str] = (sys.executable,),
) -> Iterator[RunningServer]:
    """Run another command of this project that says where it listens.

    Parameters
    ----------
    place, name
        Directory for its log, and what that is called.
    program
        Python that calls the command.
    options
        Of the command.
    model
        What clients call the model behind it.
    python
        The interpreter, with options of its own.

    Raises
    ------
    ServerError
        Where it does not start.
    """
    log = place / f"{name}.log"
    command = [*python, "-c", program, *options]
    with server_process(command, log, subprocess.PIPE) as process:
        assert process.stdout is not None
        watch = threading.Timer(_START_SECONDS, process.kill)
        watch.start()
        try:
            said = process.stdout.readline()
        finally:
            watch.cancel()
        found = re.search(r"http://\S+\d", said)
        if found is None:
            raise ServerError(f"{name} did not start: {_tail(log)}")
        fields = {"ignore_eos": True}
        yield RunningServer(found.group(), model, process, fields, log)


@contextmanager
def server_process(
    command: Sequence[str],
    log: Path,
    output: int = subprocess.DEVNULL,
    variables: Mapping[str, str] | None = None,
    kept_back: tuple[str, ...] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that writes its errors to a file, and end it as a user would.

    Parameters
    ----------
    command
        Program and arguments.
    log
        File that its standard error is added to.
    output
        Where its standard output goes, as `subprocess` names it.
    variables
        Of its environment, beside those of this process.
    kept_back
        How names of variables of this process begin that it does not get.
    """
    # Nobody asks a hub while time is taken.
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **(variables or {})}
    given = {name: one for name, one in os.environ.items() if not name.startswith(kept_back)}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, text=True, env={**given, **own}
        )
    try:
        yield process
    finally:
        left = _family(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for one in left[1:]:
            # What it had started goes with it, so that it takes no time from the next server.
            with suppress(OSError):
                os.kill(one, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


def await_health(running: RunningServer, name: str, log: Path) -> None:
    """Wait until `/health` has status 200.

    Parameters
    ----------
    running
        The server.
    name, log
        What it is called, and the file that it writes its errors to.

    Raises
    ------
    ServerError
        Where it ends before, or takes longer than five minutes.
    """
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if running.process.poll() is not None:
            break
        with suppress(OSError, http.client.HTTPException):
            if health_status(*running.address) == 200:
                return
        time.sleep(0.2)
    raise ServerError(f"{name} did not start: {_tail(log)}")


def health_status(host: str, port: int) -> int:
    """Return the status of `/health`, over a connection of its own."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


# --- inside ---


def _family(process: int) -> list[int]:
    """Return a process and all that came of it and are there, it first."""
    found = [process]
    for one in found:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    """Return the address that `hillinfer serve` says, once its model is ready."""
    assert process.stdout is not None
    # One that says nothing is ended, so that nobody waits for its line.
    watch = threading.Timer(_START_SECONDS, process.kill)
    watch.start()
    try:
        said, ready = process.stdout.readline(), process.stdout.readline()
    finally:
        watch.cancel()
    found = re.search(r"http://\S+\d", said)
    if found is None or "is ready" not in ready:
        raise ServerError(f"hillinfer serve did not start: {_tail(log)}")
    return found.group()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_MOST_TOLD:] or "it wrote nothing"
