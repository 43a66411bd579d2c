# SPDX-License-Identifier: Apache-2.0
"""The PYNQ front as a process: started, asked with a deadline, ended with all it has started."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from hillinfer.devices.xrt.xclbin import shell_of
from hillinfer.errors import HillInferError
from hillinfer.system.processes import SessionGuard, end_session
from hillinfer_model.beats import Beats

_PROGRAM = Path(__file__).with_name("front.py")
# XRT's driver makes its sockets in /tmp/$USER: there, the folder can hold them too.
_PARENT = Path("/tmp")
# The front's own deadline comes first, because it can say more.
GRACE_S, _CLOSE_S = 3.0, 10.0
_TAIL = 2000


class PynqError(HillInferError):
    """A front that does not start, fails, answers wrongly or hangs; nothing of it is left."""


class FrontProcess:
    """One front, and the folder it shares with the host.

    Parameters
    ----------
    python
        Interpreter of the environment with pynq.
    xclbin
        Bytes of the xclbin.
    platform
        What the xclbin was built for; the card may name it, or its shell.
    spec_hash
        First bytes of the status beats, as hexadecimal digits.
    environment
        Variables that lead to XRT.
    seconds
        In which the card must be loaded.
    grace
        Seconds that it has beyond those of a launch, to say that this did not end.

    Raises
    ------
    PynqError
        Where the front does not start in time; nothing of it is left then.
    """

    def __init__(
        self,
        python: Path,
        xclbin: bytes,
        platform: str,
        spec_hash: str,
        environment: Mapping[str, str],
        seconds: float,
        grace: float = GRACE_S,
    ) -> None:
        self._count = 0
        # Launches without an answer: an interrupt leaves one to the front.
        self._asked: set[str] = set()
        self._unread = b""
        self._grace = grace
        # Only its owner can enter it.
        self.folder = Path(tempfile.mkdtemp(prefix="hillinfer-pynq-", dir=_PARENT))
        (self.folder / "kernels.xclbin").write_bytes(xclbin)
        settings = {
            "xclbin": str(self.folder / "kernels.xclbin"),
            "platforms": list(dict.fromkeys([platform, shell_of(platform)])),
            "spec_hash": spec_hash,
        }
        (self.folder / "settings.json").write_text(json.dumps(settings))
        self._log = self.folder / "front.log"
        variables = {**os.environ, **environment}
        if "XCL_EMULATION_MODE" in variables:
            # Everything that the driver makes is in the folder: sockets, and the card's process.
            variables |= {"USER": self.folder.name, "SDACCEL_EM_RUN_DIR": str(self.folder)}
        try:
            guard = SessionGuard(self.folder)
        except OSError as error:
            raise PynqError(f"cannot start a process: {error.strerror}") from error
        self._replies, theirs = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [python, "-I", _PROGRAM, self.folder, str(theirs)],
                    cwd=self.folder, env=variables, pass_fds=(theirs,),
                    start_new_session=True, stdin=subprocess.PIPE, stdout=log, stderr=log,
                )  # fmt: skip
        except OSError as error:
            os.close(self._replies)
            guard.close()
            raise PynqError(f"cannot start {python}: {error.strerror}") from error
        finally:
            os.close(theirs)
        self._end = weakref.finalize(self, _end, self._process, self.folder, self._replies, guard)
        self._wait("ready", None, "load the card", seconds)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._end.alive

    def launch(
        self,
        kernel: str,
        buffers: Mapping[str, Beats],
        scalars: Mapping[str, int],
        results: tuple[str, ...],
        seconds: float,
    ) -> tuple[Beats, ...]:
        """Run one launch.

        Parameters
        ----------
        kernel
            Its name.
        buffers
            Content of what its pointer arguments point to, uint8 of shape (beats, 64).
        scalars
            Its other arguments.
        results
            The buffers to return.
        seconds
            In which it must end.

        Raises
        ------
        PynqError
            Where it does not end in time or the front fails; nothing of the front is left then.
        """
        name = f"launch-{self._count}"
        self._count += 1
        folder = self.folder / name
        for part in ("in", "out"):
            (folder / part).mkdir(mode=0o700, parents=True)
        request = {
            "kernel": kernel,
            "pointers": list(buffers),
            "scalars": dict(scalars),
            "results": list(results),
            "seconds": seconds,
        }
        (folder / "launch.json").write_text(json.dumps(request))
        for own, content in buffers.items():
            np.save(folder / "in" / f"{own}.npy", content, allow_pickle=False)
        assert self._process.stdin is not None
        self._asked.add(name)
        # Where nobody reads, the answer says why, or is missing.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()
        self._wait("done", name, f"run {kernel}", seconds + self._grace)
        self._asked.remove(name)
        found = tuple(self._read(folder / "out" / f"{own}.npy", buffers[own]) for own in results)
        shutil.rmtree(folder)
        return found

    def close(self) -> None:
        """Let the card go; what has not ended by itself in a few seconds is killed."""
        if self._end.alive:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            # The front's end of the pipe is closed when it has let the card go.
            select.select([self._replies], [], [], _CLOSE_S)
            self._end()

    def _wait(self, key: str, name: str | None, what: str, seconds: float) -> None:
        """Wait for an answer; end everything and raise where it is none or no good one."""
        reason = self._answer(key, name, seconds)
        if reason is not None:
            log = self._log.read_text(errors="replace")[-_TAIL:].strip()
            self._end()
            raise PynqError(f"the PYNQ front could not {what}: {reason}\n{log}".strip())

    def _answer(self, key: str, name: str | None, seconds: float) -> str | None:
        """Return None once the awaited answer is there, or what came in its place.

        Where `name` is a launch's, answers to others that nobody waits for any more are passed by.
        """
        end = time.monotonic() + seconds
        while True:
            while b"\n" not in self._unread:
                left = max(0, end - time.monotonic())
                ready, _, _ = select.select([self._replies], [], [], left)
                if not ready:
                    return f"no answer after {seconds:g} s"
                part = os.read(self._replies, 1 << 16)
                if not part:
                    return "it has ended"
                self._unread += part
            line, _, self._unread = self._unread.partition(b"\n")
            try:
                fields = json.loads(line)
            except ValueError:
                return f"an answer that cannot be read: {line[:200]!r}"
            if not isinstance(fields, dict):
                return repr(fields)
            if key not in fields:
                return str(fields.get("error", fields))
            own = str(fields[key])
            if name is None or own == name:
                return None
            if own not in self._asked:
                return f"an answer to another launch: {own}"
            self._asked.remove(own)
            shutil.rmtree(self.folder / own, ignore_errors=True)
            # Only now does the front begin with what was asked last.
            end = time.monotonic() + seconds

    def _read(self, file: Path, like: Beats) -> Beats:
        try:
            content: Beats = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            self._end()
            raise PynqError(f"the PYNQ front left no {file.name}: {error}") from error
        if content.dtype != like.dtype or content.shape != like.shape:
            self._end()
            raise PynqError(
                f"{file.name} of {content.dtype} {content.shape}, not {like.dtype} {like.shape}"
            )
        return content


def _end(process: subprocess.Popen[bytes], folder: Path, replies: int, guard: SessionGuard) -> None:
    """Kill the front and everything it has started, and remove its folder."""
    end_session(process, folder)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    os.close(replies)
    guard.close()
