# SPDX-License-Identifier: Apache-2.0
"""Servers as processes of their own: ours, and that of transformers."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_START_SECONDS, _END_SECONDS = 300.0, 60.0
_OWN = "from hillinfer_command import main; main()"
_TRANSFORMERS = "from transformers.cli.transformers import main; main()"
# What `transformers serve` imports beside transformers itself.
_MODULES = ("fastapi", "uvicorn", "openai", "pydantic")
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
        """Most memory that the process had so far, its files that are mapped included."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found.group(1)) << 10 if found else 0


@contextmanager
def hillinfer_server(
    place: Path,
    model: str,
    parallel: int,
    options: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
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

    Raises
    ------
    ServerError
        Where it does not start.
    """
    cold = place / "cold"
    cold.mkdir(parents=True, exist_ok=True)
    # The budget is above all rows of all parts, so that no figure is the drive's.
    command = [sys.executable, "-c", _OWN, "serve", "--port", "0", "--model", model]
    command += ["--alias", "bench", "--parallel", str(parallel), "--dram-budget", "2GiB"]
    command += ["--store", str(place / "store"), "--store-size", "8GiB", "--cold-dir", str(cold)]
    command += options
    log = place / "server.log"
    with _process(command, log, subprocess.PIPE) as process:
        url = _announced(process, log)
        # Answers of one length: what is compared is time.
        fields = {"ignore_eos": True}
        yield RunningServer(url, "bench", process, fields, log, dict(headers or {}))


@contextmanager
def command_server(
    place: Path, name: str, program: str, options: Sequence[str], model: str
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

    Raises
    ------
    ServerError
        Where it does not start.
    """
    log = place / f"{name}.log"
    command = [sys.executable, "-c", program, *options]
    with _process(command, log, subprocess.PIPE) as process:
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
def transformers_server(place: Path, folder: Path, number_type: str) -> Iterator[RunningServer]:
    """Run `transformers serve` of this environment with the model of a folder.

    Parameters
    ----------
    place
        Directory for its log.
    folder
        With config, tokenizer and weights.
    number_type
        That it computes in, such as `bfloat16`: ours, since its own choice may be slow here.

    Raises
    ------
    ServerError
        Where something that it needs is missing, or it does not start.
    """
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        raise ServerError(f"{', '.join(missing)} is not installed, which transformers serve needs")
    place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    model = str(folder.absolute())
    command = [
        sys.executable,
        "-c",
        _TRANSFORMERS,
        "serve",
        model,
        "--device",
        "cpu",
        "--dtype",
        number_type,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    log = place / "rival.log"
    with _process(command, log, subprocess.DEVNULL) as process:
        running = RunningServer(f"http://127.0.0.1:{port}", model, process)
        _await_health(running, log)
        yield running


# --- inside ---


@contextmanager
def _process(command: list[str], log: Path, output: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that writes its errors to a file, and end it as a user would."""
    # Nobody asks a hub while time is taken.
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True, env=variables)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


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


def _await_health(running: RunningServer, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if running.process.poll() is not None:
            break
        with suppress(OSError, http.client.HTTPException):
            if health_status(*running.address) == 200:
                return
        time.sleep(0.2)
    raise ServerError(f"transformers serve did not start: {_tail(log)}")


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


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_MOST_TOLD:] or "it wrote nothing"
