# SPDX-License-Identifier: Apache-2.0
"""A process that has imported everything, and forks one that runs the command for each request.

A command then takes a tenth of a second instead of three, ends as any Python process does, and is
a process of its own: it can be killed, limited, and given closed outputs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import random
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from hillinfer_bench.cli.programs import module_of

_SUBREAPER = 36
_MOST_REQUEST = 1 << 20


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; return what to run in such a process, None at the end."""
    # Orphans of a command become children of this process, which can tell of them.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    started: set[int] = set()
    while True:
        ready, _, _ = select.select([control], [], [], 0.01)
        if ready:
            data, descriptors, _, _ = socket.recv_fds(control, _MOST_REQUEST, 3)
            if not data:
                return None
            request: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if pid == 0:
                control.close()
                become(request, descriptors)
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            started.add(pid)
            _tell(control, {"pid": pid})
        _reap(control, started)


def _reap(control: socket.socket, started: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in started:
            started.discard(pid)
            _tell(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(control: socket.socket, what: dict[str, int]) -> None:
    control.send(json.dumps(what).encode())


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over the outputs, the folder, the limits and the variables of a request."""
    os.setsid()
    for number, place in enumerate(request["places"]):
        os.dup2(descriptors[place], number) if place is not None else _close(number)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.update(request["variables"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # As Python itself does at its start; an interrupt means nothing before there is a command.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed(0)
    for name, value in request["limits"].items():
        if name == "RLIMIT_AS":
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
            value += int(pages) * resource.getpagesize()
        number = getattr(resource, name)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return


def _stream(number: int) -> Any:
    try:
        os.fstat(number)
    except OSError:
        # A process that starts with a closed descriptor has no stream for it.
        return None
    raw = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8")
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=number == 2
    )


def run() -> None:
    """Wait for requests; in a forked process, run the command and end as the script does."""
    from fuzzing.preloaded import preload

    preload()
    # Otherwise each command copies all of this memory when it ends and collects garbage.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    _tell(control, {"ready": os.getpid()})
    request = serve(control)
    if request is None:
        return
    sys.argv = ["hillinfer", *request["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module(module_of(request["arguments"])).main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run()
