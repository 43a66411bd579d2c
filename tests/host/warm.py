# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs that find torch, transformers and HillInfer imported already.

Importing them takes five seconds of a processor, and tests start a hundred programs. One process
per worker imports them and forks a child for each program. What a test starts in place of the
interpreter is this file: a small process that hands its streams, environment, directory and limits
to the child, passes signals on to it and ends as it ended, so `subprocess` serves as ever.

Not for tests of what importing does, nor of all of a process's memory: a child begins with what was
imported. A killed program ends a moment after what its caller holds: `communicate` waits for its
output to end, which comes before that of its locks, and `wait` for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import traceback
import types
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LIMITS = tuple(
    getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
)
_MODULES = (
    *("torch", "transformers", "transformers.generation.utils", "accelerate"),
    "transformers.conversion_mapping",
    *(
        "hillinfer",
        "hillinfer.cli.main",
        "hillinfer.cli.run",
        "hillinfer.store.store",
        "hillinfer_bench.cli.programs",
    ),
    # What reading arguments loads.
    *("pydantic", "pydantic.type_adapter", "typer._adapters"),
)
# Of a number on the way, in bytes.
_LENGTH = 8
# Descriptors above what a program opens by itself.
_ABOVE = 900


class WarmPython:
    """The process that forks; `command` goes where `sys.executable` would."""

    def __init__(self, folder):
        self._place = folder / "warm"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(self._place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout.read(1) == b"+", "it did not start"

    @property
    def command(self):
        return (sys.executable, "-S", "-E", "-s", __file__, "call", str(self._place))

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def _call(place, words):
    """Be the program's end that its caller holds."""
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    server = socket.socket(socket.AF_UNIX)
    # Descriptors that the caller left closed stay closed.
    server = socket.socket(fileno=_moved(server.detach(), 3))
    server.connect(place)
    streams = [number for number in range(3) if _is_open(number)]
    told = pickle.dumps(
        {
            "words": words,
            "streams": streams,
            "directory": str(Path.cwd()),
            "environment": dict(os.environ),
            "umask": _umask(),
            "limits": {one: resource.getrlimit(one) for one in _LIMITS},
            "ignored": [one for one, handler in before.items() if handler is signal.SIG_IGN],
        }
    )
    child, early = None, []

    def pass_on(number, frame):
        if child is None:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    # Before anything is asked: a program may say that it runs before its number is known here.
    for one, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(one, pass_on)
    socket.send_fds(server, [len(told).to_bytes(_LENGTH, "little")], streams)
    server.sendall(told)
    child = int.from_bytes(_whole(server, _LENGTH), "little")
    for number in early:
        pass_on(number, None)
    # Whoever reads what the child writes sees the child's end, not this one's.
    for number in streams:
        os.close(number)
    status = os.waitstatus_to_exitcode(int.from_bytes(_whole(server, _LENGTH), "little"))
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _serve(place):
    """Fork a child for each caller until standard input ends; return what the child is to run."""
    # What importing makes stays; looking through it again and again takes a quarter of the time.
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    # Modules that wait to be asked for.
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM"):
        getattr(sys.modules["transformers"], name)
    # What weights are called in all models that there are; a tenth of a second.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
    for command in ("generate", "decode"):
        _ = sys.modules["hillinfer_bench.cli.programs"].main_of([command]).parser
    # Collecting garbage would touch, and so copy, every page of a child.
    gc.collect()
    gc.freeze()
    gc.enable()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(16)
    os.write(1, b"+")
    callers, ends = {}, {}
    while True:
        for one in select.select([0, listening, *callers, *ends], [], [])[0]:
            if one == 0:
                for child, _ in ends.values():
                    os.kill(child, signal.SIGKILL)
                return None
            if one is listening:
                caller, _ = listening.accept()
                try:
                    asked, streams = _asked(caller)
                except (EOFError, OSError):
                    # Killed before it had asked.
                    caller.close()
                    continue
                child = os.fork()
                if child == 0:
                    _become(asked, streams)
                    return asked["words"]
                for stream in streams:
                    os.close(stream)
                callers[caller] = child
                ends[os.pidfd_open(child)] = child, caller
                _answer(caller, child)
            elif one in ends:
                child, caller = ends.pop(one)
                os.close(one)
                callers.pop(caller, None)
                _answer(caller, os.waitpid(child, 0)[1])
                caller.close()
            elif one in callers:
                # Whoever was killed takes the child along.
                os.kill(callers.pop(one), signal.SIGKILL)


def _answer(caller, number):
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        caller.sendall(number.to_bytes(_LENGTH, "little"))


def _asked(caller):
    length, streams, _, _ = socket.recv_fds(caller, _LENGTH, 3)
    if len(length) < _LENGTH:
        raise EOFError
    return pickle.loads(_whole(caller, int.from_bytes(length, "little"))), streams


def _become(asked, streams):
    """Be as a process that was just started with these streams, limits and words."""
    moved = [_moved(stream, _ABOVE) for stream in streams]
    os.closerange(0, min(moved, default=_ABOVE))
    for number, stream in zip(asked["streams"], moved, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if number in asked["streams"]:
            mode, errors = "w" if number else "r", "backslashreplace" if number == 2 else "strict"
            # As Python makes them at its start.
            buffering = 1 if number == 2 else -1
            stream = open(  # noqa: SIM115
                number, mode, buffering, encoding="utf-8", errors=errors, closefd=False
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(asked["directory"])
    os.umask(asked["umask"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for one in _SIGNALS:
        begun = signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL
        signal.signal(one, signal.SIG_IGN if one in asked["ignored"] else begun)
    for one, limit in asked["limits"].items():
        resource.setrlimit(one, limit)


def _run(words):
    """Run what stands behind `python`: -c and a text, or a script."""
    program = types.ModuleType("__main__")
    if words[0] == "-c":
        text, name, sys.argv = words[1], "<string>", ["-c", *words[2:]]
        sys.path[0] = ""
    else:
        text, name, sys.argv = Path(words[0]).read_text(), words[0], words
        program.__file__ = name
        sys.path[0] = str(Path(name).resolve().parent)
    given = os.environ.get("PYTHONPATH")
    sys.path[1:1] = [one for one in (given or "").split(os.pathsep) if one and one not in sys.path]
    sys.modules["__main__"] = program
    exec(compile(text, name, "exec"), program.__dict__)


def _end(status):
    """End as the interpreter does, but for its modules, whose taking apart takes a second."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        if sys.stderr is not None:
            print(status, file=sys.stderr)
        status = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"Exception ignored: {error}\n".encode())
            status = 120
    os._exit((status or 0) & 0xFF)


def _whole(server, length):
    read = b""
    while len(read) < length:
        piece = server.recv(length - len(read))
        if not piece:
            raise EOFError("the other end was killed")
        read += piece
    return read


def _umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _moved(descriptor, least):
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    os.close(descriptor)
    return moved


if __name__ == "__main__":
    if sys.argv[1] == "call":
        _call(sys.argv[2], sys.argv[3:])
    _words = _serve(sys.argv[2])
    if _words is not None:
        try:
            _run(_words)
        except SystemExit as ended:
            _end(ended.code)
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
            _end(1)
        _end(0)
