# SPDX-License-Identifier: Apache-2.0
"""The process that reaches a card: its variables, deadlines, end, and what it takes of memory."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin
from hillinfer.errors import DeviceError, SettingsError
from hillinfer.system.processes import SessionGuard, end_session

# --- Deadlines ---

_VITIS = "XILINX_VITIS"


@dataclass(frozen=True)
class Deadlines:
    """How long the host waits for the card, in seconds.

    `load` is for the worker and the card's image, `answer` for a copy, `progress` for the next sign
    of a launch that is under way.
    """

    load: float = 120.0
    answer: float = 30.0
    progress: float = 60.0


_CARD = Deadlines()
# A simulator takes minutes to start; Vitis' advances by few cycles a second, as it simulates the
# platform with the kernels. Guessed, not measured: late is better than giving up what works.
_SIMULATOR = Deadlines(load=900.0, answer=300.0, progress=1800.0)


def deadlines_of(xclbin: Xclbin, environment: Mapping[str, str]) -> Deadlines:
    """Return how long to wait for what an xclbin is for: a card, or Vitis' simulator of one.

    The environment is that of the process that loads the xclbin: variables of Vitis are among them
    where Vitis emulates.
    """
    return _SIMULATOR if xclbin.mode == HW_EMU and _VITIS in environment else _CARD


# --- Variables of an emulated card ---

# Beside an xclbin for an emulated card.
ENVIRONMENT_FILE = "environment.json"
_MODE = "XCL_EMULATION_MODE"
# What XRT's driver for emulation is told of its folder. Nothing here names programs, libraries or
# modules elsewhere: those a shell must name that its user has set up.
_PATHS = ("EMCONFIG_PATH", "SDACCEL_EM_RUN_DIR", "XILINX_XRT", "XRT_INI_PATH")
_MOST_BYTES = 1 << 16
_MOST_CHARACTERS = 4096
_WRITE = stat.S_IWGRP | stat.S_IWOTH


def environment_of(xclbin: Path) -> dict[str, str]:
    """Return the variables beside an xclbin for an emulated card; none for a card's.

    They are `XCL_EMULATION_MODE` and paths inside the image's folder, absolute. Such an xclbin is a
    program, and what lies beside it decides what else runs. So it counts only where nobody but its
    user and root can have written it, and sets only what the emulation needs. Where `xclbin` is a
    link, what it leads to counts.

    Raises SettingsError where the file is there and does not hold such variables, or where others
    than the user may have written it, the image or their folder, and XclbinError where the image
    cannot be read.
    """
    if Xclbin.read(xclbin).mode != HW_EMU:
        return {}
    image = xclbin.resolve()
    try:
        with closing(_Opened.folder(image.parent)) as folder:
            folder.check()
            with closing(_Opened.file(image, folder)) as own:
                own.check()
            try:
                beside = _Opened.file(image.with_name(ENVIRONMENT_FILE), folder)
            except FileNotFoundError:
                return {}
            with closing(beside):
                beside.check()
                content = beside.content()
    except OSError as error:
        raise SettingsError(
            f"{image.with_name(ENVIRONMENT_FILE)} cannot be read: {error.strerror}"
        ) from error
    return _variables(content, image.with_name(ENVIRONMENT_FILE))


@dataclass(frozen=True)
class _Opened:
    """A file or folder that stays the same one between the look at it and reading it."""

    path: Path
    descriptor: int

    @classmethod
    def folder(cls, path: Path) -> _Opened:
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    @classmethod
    def file(cls, path: Path, folder: _Opened) -> _Opened:
        # A link is not followed, and a pipe does not wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return cls(path, os.open(path.name, flags, dir_fd=folder.descriptor))

    def check(self) -> None:
        """Refuse what others than the user and root may have written."""
        facts = os.fstat(self.descriptor)
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & _WRITE:
            raise SettingsError(
                f"{self.path} decides what runs beside this process, and others may have written "
                f"it: own it, and chmod go-w {self.path}"
            )

    def content(self) -> bytes:
        """Return a regular file's bytes, which are few."""
        facts = os.fstat(self.descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SettingsError(f"{self.path} is no regular file: make the card again")
        if facts.st_size > _MOST_BYTES:
            raise SettingsError(
                f"{self.path} of {facts.st_size} bytes is too large: make the card again"
            )
        # One byte more than there may be shows a file that grew since.
        return os.read(self.descriptor, _MOST_BYTES + 1)

    def close(self) -> None:
        os.close(self.descriptor)


def _variables(content: bytes, file: Path) -> dict[str, str]:
    try:
        named = json.loads(content.decode("utf-8"), object_pairs_hook=_unlike)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{file} cannot be read: {error}; make the card again") from error
    if not isinstance(named, dict):
        raise SettingsError(f"{file} does not hold names and values of variables")
    return {name: _value(name, value, file) for name, value in named.items()}


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _value(name: str, value: object, file: Path) -> str:
    """Return what a variable is set to, a path made absolute."""
    if name != _MODE and name not in _PATHS:
        raise SettingsError(
            f"{file} sets {name!a:.99}, and only {', '.join((_MODE, *_PATHS))} may be set there: "
            "take it out, and set it in your own shell if you trust it"
        )
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise SettingsError(f"{file}: {name} is no text of at most {_MOST_CHARACTERS} characters")
    if not _can_be_set(value):
        raise SettingsError(
            f"{file}: {name} is {value!a:.99}, which no variable can hold: make the card again"
        )
    if name == _MODE:
        if value != "hw_emu":
            raise SettingsError(f"{file}: {name} is {value!a:.99}, not 'hw_emu'")
        return value
    # By its name: links inside are as good as the folder, which is the user's.
    path = os.path.normpath(file.parent / value)
    if not Path(path).is_relative_to(file.parent):
        raise SettingsError(
            f"{file}: {name} is {value!a:.99}, which is not inside {file.parent}: set it in your "
            "own shell if you trust it"
        )
    return path


def _can_be_set(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        # Half a character, which JSON can name.
        return False


# --- The worker as a process ---

_PROGRAM = Path(__file__).with_name("worker.py")
# XRT's driver makes its sockets in /tmp/$USER: there, the folder can hold them too.
_PARENT = Path("/tmp")
_MESSAGE_BYTES = 1 << 16
_CLOSE_S = 10.0
_TAIL = 2000


class WorkerProcess:
    """One worker, and `window`, the memory that it shares with the host, uint8.

    `environment` leads to XRT and pyxrt, beside this process's own variables; within `seconds` the
    worker must be there. Raises DeviceError where it does not start in time; nothing of it is left
    then.
    """

    def __init__(self, environment: Mapping[str, str], window_bytes: int, seconds: float) -> None:
        # Only its owner can enter it.
        self.folder = Path(tempfile.mkdtemp(prefix="hillinfer-xrt-", dir=_PARENT))
        variables = {**os.environ, **environment}
        if "XCL_EMULATION_MODE" in variables:
            # Everything that the driver makes is in the folder: sockets, and the card's process.
            variables |= {"USER": self.folder.name, "SDACCEL_EM_RUN_DIR": str(self.folder)}
        try:
            guard = SessionGuard(self.folder)
        except OSError as error:
            raise DeviceError(f"the card's process cannot be started: {error.strerror}") from error
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = own
        self._log = self.folder / "worker.log"
        try:
            with self._log.open("ab") as log:
                # Without a fork of this process, whose memory may be large, and without its files.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", _PROGRAM, str(theirs.fileno())],
                    cwd=self.folder, env=variables, pass_fds=(theirs.fileno(),),
                    start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
        except OSError as error:
            own.close()
            guard.close()
            raise DeviceError(f"the card's process cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self.folder, own, guard)
        self._expect("start", seconds)
        self.window = self._share(window_bytes, seconds)

    @property
    def pid(self) -> int:
        """The process's number, which is its session's, too."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._end.alive

    def ask(
        self, what: str, seconds: float, files: Sequence[int] = (), **given: Any
    ) -> dict[str, Any]:
        """Make the worker do something and return its answer.

        `what` is the name of the call and `given` what it is told; it gets copies of the
        descriptors in `files`, and its answer must come within `seconds`. Raises DeviceError where
        it fails or does not answer in time; nothing of the worker is left then.
        """
        self.send(what, files, **given)
        return self.receive(what, seconds)

    def send(self, what: str, files: Sequence[int] = (), **given: Any) -> None:
        """Make the worker do something; its answers are received one by one."""
        self._check_running(what)
        try:
            message = json.dumps({"do": what, **given}).encode()
            socket.send_fds(self._channel, [message], files)
        except OSError as error:
            raise self._failed(what, f"its process has ended ({error.strerror})") from error

    def receive(self, what: str, seconds: float) -> dict[str, Any]:
        """Return the next answer; raises as `ask` does."""
        self._check_running(what)
        return self._expect(what, seconds)

    def close(self) -> None:
        """Let the card go; what has not ended by itself in a few seconds is killed."""
        if self._end.alive:
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(_CLOSE_S)
            try:
                # The worker's end is closed when it has let the card go.
                while self._channel.recv(_MESSAGE_BYTES):
                    pass
            except OSError:
                pass
            self._end()

    def abandon(self) -> None:
        """End the worker and all it has started at once; harmless when done twice."""
        self._end()

    def _check_running(self, what: str) -> None:
        if not self.running:
            raise DeviceError(
                f"the card cannot {what}: it was let go, as a call to it was interrupted"
            )

    def _share(self, size: int, seconds: float) -> NDArray[np.uint8]:
        file = os.memfd_create("hillinfer-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            window = mmap.mmap(file, size)
            self.send("window", [file], size=size)
        finally:
            os.close(file)
        self._expect("share memory", seconds)
        return np.frombuffer(window, dtype=np.uint8)

    def _expect(self, what: str, seconds: float) -> dict[str, Any]:
        self._channel.settimeout(seconds)
        try:
            content = self._channel.recv(_MESSAGE_BYTES)
        except TimeoutError:
            raise self._failed(what, f"no answer after {seconds:g} s") from None
        except OSError as error:
            raise self._failed(what, f"its process has ended ({error.strerror})") from error
        if not content:
            raise self._failed(what, "its process has ended")
        try:
            answer = json.loads(content)
        except ValueError:
            raise self._failed(what, f"an answer that cannot be read: {content[:99]!r}") from None
        if not isinstance(answer, dict) or "error" in answer:
            reason = answer.get("error") if isinstance(answer, dict) else answer
            raise self._failed(what, str(reason))
        return answer

    def _failed(self, what: str, reason: str) -> DeviceError:
        """End everything and return the error that says why."""
        log = self._log.read_text(errors="replace")[-_TAIL:].strip() if self._log.exists() else ""
        self._end()
        return DeviceError(f"the card could not {what}: {reason}" + (f"\n{log}" if log else ""))


def _end(
    process: subprocess.Popen[bytes], folder: Path, channel: socket.socket, guard: SessionGuard
) -> None:
    end_session(process, folder)
    channel.close()
    guard.close()


# --- Memory taken by processes ---


class MemoryClaims:
    """The claims of one process on one card, beside those of the user's other processes.

    First come, first served, piece by piece: a claim is admitted while all of them fit in the
    card's memory, and those of processes that have ended do not count. Processes of other users are
    not seen here; where the card has no memory left for a claim, it is given back. The claims of
    all cards lie in `folder`, owner-only. `memory_bytes` is what all processes together may take of
    this card. A claim raises DeviceError where the file cannot be read or written.
    """

    def __init__(self, folder: Path, card: str, memory_bytes: int) -> None:
        # A card's name is no file's.
        self._path = folder / f"{hashlib.sha256(card.encode()).hexdigest()[:16]}.json"
        self._memory_bytes = memory_bytes
        self._own = f"{os.getpid()} {_start_of(os.getpid())} {id(self):x}"

    def claim(self, size: int) -> bool:
        """Take bytes; False where they do not fit beside what all processes hold."""
        with self._claims() as claims:
            if sum(claims.values()) + size > self._memory_bytes:
                return False
            claims[self._own] = claims.get(self._own, 0) + size
            return True

    def give_back(self, size: int) -> None:
        """Let go of bytes that were claimed and could not be taken."""
        with self._claims() as claims:
            claims[self._own] = claims.get(self._own, 0) - size

    def release(self) -> None:
        """Let go of everything; harmless when done twice."""
        # A file that is out of reach ends no run: what it claims ends with this process.
        with suppress(DeviceError), self._claims() as claims:
            claims.pop(self._own, None)

    @contextmanager
    def _claims(self) -> Iterator[dict[str, int]]:
        """Yield the claims of living processes, and keep what the block makes of them."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            # Each time: who clears a cache takes the folder away while cards are in use.
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                claims = _living(os.pread(file, 1 << 20, 0))
                yield claims
                content = json.dumps(claims).encode()
                os.ftruncate(file, 0)
                os.pwrite(file, content, 0)
            finally:
                os.close(file)
        except OSError as error:
            raise DeviceError(
                f"the card's memory cannot be shared: {self._path}: {error.strerror}"
            ) from error


def _living(content: bytes) -> dict[str, int]:
    """Return the claims whose processes still run; none where the file says nothing sensible."""
    try:
        claims = json.loads(content or b"{}")
    except ValueError:
        return {}
    living = {}
    for own, size in claims.items() if isinstance(claims, dict) else ():
        pid, start, _ = (*own.split(), "", "", "")[:3]
        if pid.isdigit() and isinstance(size, int) and start == _start_of(int(pid)):
            living[own] = size
    return living


def _start_of(pid: int) -> str:
    """Return when a process started, as its number may come again; empty if there is none."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold anything, so fields count from its end.
    return content.rpartition(")")[2].split()[19]
