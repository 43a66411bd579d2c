# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a worker: a process that answers requests in time or is ended."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from peers.peer_environment import PeerSkippedError

_ENDING_SECONDS = 10

# Variables of the shell with these beginnings say how idle threads wait, where threads run and what
# vLLM does; a worker is not given them, so that its runtime keeps its own defaults.
_NOT_INHERITED = ("GOMP_", "KMP_", "OMP_", "VLLM_")


class PeerProcess:
    """One worker; a context manager that ends it.

    Parameters
    ----------
    command
        Interpreter and script.
    threads
        Of computing, for every library that reads it from the environment.
    seconds
        Longest time for one answer.
    log
        File that standard error is added to.
    preloaded
        Libraries that are loaded first.
    variables
        Of the environment, over all others.
    """

    def __init__(
        self,
        command: Sequence[str],
        threads: int,
        seconds: float,
        log: Path,
        preloaded: Sequence[Path] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._seconds, self._log = seconds, log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(Path(command[0]), threads, preloaded, variables),
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises
        ------
        PeerSkippedError
            Where the worker answers with an error, ends or does not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It ended; the missing answer says so below.
        line = self._line()
        if not line:
            raise PeerSkippedError(f"the worker ended without an answer; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerSkippedError(f"{answer['error']} (all of it: {self._log})")
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            # An answer is one line, written at once: its beginning means that its end is near.
            if not waiting.select(self._seconds):
                raise PeerSkippedError(f"no answer within {self._seconds:.0f} s")
        return self._process.stdout.readline()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_ENDING_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _environment(
    python: Path, threads: int, preloaded: Sequence[Path], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a worker: so many threads, and nobody's packages but its own."""
    changes = {
        "OMP_NUM_THREADS": str(threads),
        # Everything is on this machine; a library that asks a hub waits for a network.
        "HF_HUB_OFFLINE": "1",
        # Libraries that compile look for their tools beside their interpreter.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    variables = inherited | changes
    if python != Path(sys.executable):
        variables.pop("PYTHONPATH", None)
    if preloaded:
        variables["LD_PRELOAD"] = os.pathsep.join(map(str, preloaded))
    return variables | dict(given)
