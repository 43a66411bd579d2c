# SPDX-License-Identifier: Apache-2.0
"""Starts commands in processes of their own and says how they ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

ZYGOTE = Path(__file__).with_name("zygote.py")
MOST_SECONDS = 60
_START_SECONDS = 180
# What a command may end with; 130 and 143 after signals that it was sent, 141 after a dead pipe.
_EXITS = frozenset({0, 1, 2, 141})
_SENT = {signal.SIGINT: 130, signal.SIGTERM: 143}
_ERROR = "hillinfer: error: "
# What an interpreter or a library in Rust says of what nobody caught.
_UNCAUGHT = ("Traceback", "Exception ignored", "panicked at", "stack backtrace")


@dataclass(frozen=True)
class Setting:
    """What a command finds around it.

    Parameters
    ----------
    folder
        Where it stands.
    umask, variables, limits
        Of its process; limits by their names in `resource`, address space beyond what it has.
    stdin
        What it reads.
    stdout, stderr
        `kept`, `closed`, `dead` for a pipe that nobody reads, `leaves` for one whose reader leaves
        after a byte, or a path.
    """

    folder: Path
    umask: int = 0o022
    variables: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    stdin: bytes = b""
    stdout: str = "kept"
    stderr: str = "kept"


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Parameters
    ----------
    code
        Exit status, negative for a signal; None where it was ended for taking too long.
    out, err
        What it wrote to outputs that were kept.
    orphans
        Processes that it left behind.
    seconds
        How long it took.
    """

    code: int | None
    out: str
    err: str
    orphans: int
    seconds: float

    @property
    def refused(self) -> bool:
        """Whether it said in one line what is wrong."""
        return self.code in (1, 2)

    def wrong(self, sent: int | None = None) -> str:
        """Say what must not be, empty where nothing is.

        Parameters
        ----------
        sent
            Signal that was sent to it, None for none.
        """
        if self.code is None:
            return f"hang: ended after {self.seconds:.0f} s"
        if uncaught := uncaught_in(self.err):
            return uncaught
        if self.orphans:
            return f"leak: {self.orphans} processes left behind"
        if self.code < 0 and -self.code != sent:
            return f"crash: {signal.Signals(-self.code).name}"
        if self.code >= 0 and self.code not in {*_EXITS, _SENT.get(sent)}:
            return f"exit {self.code}: {self.err[-300:]!a}"
        said = [line for line in self.err.splitlines() if line.startswith(_ERROR)]
        if self.refused and (len(said) != 1 or not said[0].isprintable() or len(said[0]) > 2_000):
            return f"message: exit {self.code} and not one line: {self.err[-300:]!a}"
        return ""


def uncaught_in(err: str) -> str:
    """Say where standard error tells of what nobody caught, empty where it does not."""
    if any(mark in err for mark in _UNCAUGHT):
        return f"traceback: {' '.join(err.splitlines()[-3:])[-300:]}"
    return ""


class Running:
    """A command that was started.

    Parameters
    ----------
    commands
        Who started it.
    pid
        Of its process.
    out, err
        Files for what it writes.
    """

    def __init__(self, commands: Commands, pid: int, out: IO[bytes], err: IO[bytes]) -> None:
        self.pid = pid
        self._commands = commands
        self._out, self._err = out, err
        self._started = time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal; harmless where the command has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = MOST_SECONDS) -> Ended:
        """Wait for the end, and make one where it does not come."""
        code = self._commands.code_of(self.pid, seconds)
        if code is None:
            self.send(signal.SIGKILL)
            self._commands.code_of(self.pid, 10)
        taken = time.monotonic() - self._started
        orphans = self._commands.orphans(3.0)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        return Ended(code, texts[0], texts[1], orphans, taken)


class Commands:
    """A context manager that keeps one process ready to fork commands from."""

    def __enter__(self) -> Commands:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote = subprocess.Popen(
            [sys.executable, str(ZYGOTE), str(other.fileno())], pass_fds=[other.fileno()]
        )
        other.close()
        self._control = own
        self._codes: dict[int, int] = {}
        self._event(_START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._zygote.kill()
        self._zygote.wait()

    def start(self, arguments: Sequence[object], setting: Setting) -> Running:
        """Start the command with some arguments."""
        # Closed by `Running.wait`, which reads them.
        stdin, out, err = (TemporaryFile() for _ in range(3))  # noqa: SIM115
        stdin.write(setting.stdin)
        stdin.seek(0)
        opened: list[int] = []
        places: list[int | None] = [0]
        descriptors = [stdin.fileno()]
        for chosen, file in ((setting.stdout, out), (setting.stderr, err)):
            if chosen == "closed":
                places.append(None)
                continue
            if chosen == "kept":
                descriptor = file.fileno()
            else:
                pipe = {"dead": _dead_pipe, "leaves": _left_pipe}.get(chosen)
                descriptor = pipe() if pipe else os.open(chosen, os.O_WRONLY)
                opened.append(descriptor)
            places.append(len(descriptors))
            descriptors.append(descriptor)
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(setting.folder),
            "umask": setting.umask,
            "variables": dict(setting.variables),
            "limits": dict(setting.limits),
            "places": places,
        }
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        for descriptor in opened:
            os.close(descriptor)
        stdin.close()
        while True:
            event = self._event(_START_SECONDS)
            if "pid" in event:
                return Running(self, event["pid"], out, err)

    def run(
        self, arguments: Sequence[object], setting: Setting, seconds: float = MOST_SECONDS
    ) -> Ended:
        """Run the command to its end."""
        return self.start(arguments, setting).wait(seconds)

    def code_of(self, pid: int, seconds: float) -> int | None:
        """Return how a process ended, None where it did not within some seconds."""
        until = time.monotonic() + seconds
        while pid not in self._codes:
            left = until - time.monotonic()
            if left <= 0:
                return None
            with suppress(TimeoutError):
                self._event(left)
        return self._codes.pop(pid)

    def orphans(self, seconds: float) -> int:
        """Return how many processes are still there after some seconds, and end them."""
        until = time.monotonic() + seconds
        while (left := self._children()) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def _children(self) -> list[int]:
        own = self._zygote.pid
        text = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii")
        return [int(pid) for pid in text.split()]

    def _event(self, seconds: float) -> dict[str, Any]:
        self._control.settimeout(seconds)
        data = self._control.recv(65_536)
        if not data:
            raise RuntimeError("the process that forks commands ended: see above")
        event: dict[str, Any] = json.loads(data)
        if "ended" in event:
            self._codes[event["ended"]] = event["code"]
        return event


def _left_pipe() -> int:
    reading, writing = os.pipe()

    def leave() -> None:
        os.read(reading, 1)
        os.close(reading)

    threading.Thread(target=leave, daemon=True).start()
    return writing


def _dead_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
