# SPDX-License-Identifier: Apache-2.0
"""The worker as a process: started, asked with a deadline, ended with all it has started."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import DeviceError
from hillinfer.system.processes import SessionGuard, end_session

_PROGRAM = Path(__file__).with_name("worker.py")
# XRT's driver makes its sockets in /tmp/$USER: there, the folder can hold them too.
_PARENT = Path("/tmp")
_MESSAGE_BYTES = 1 << 16
_CLOSE_S = 10.0
_TAIL = 2000


class WorkerProcess:
    """One worker, and the memory it shares with the host.

    Parameters
    ----------
    environment
        Variables that lead to XRT and pyxrt, beside this process's own.
    window_bytes
        Size of the shared memory.
    seconds
        In which the worker must be there.

    Attributes
    ----------
    window
        The shared memory, uint8.

    Raises
    ------
    DeviceError
        Where it does not start in time; nothing of it is left then.
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

        Parameters
        ----------
        what
            Name of the call.
        seconds
            In which the answer must come.
        files
            Descriptors that the worker gets copies of.
        given
            What the call is told.

        Raises
        ------
        DeviceError
            Where it fails or does not answer in time; nothing of the worker is left then.
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
            message = json.dumps({"do": "window", "size": size}).encode()
            socket.send_fds(self._channel, [message], [file])
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
