# SPDX-License-Identifier: Apache-2.0
"""Runs the command in children of one process that has imported everything already.

A child is the command as a shell starts it: real standard streams, real signals and an end that
tries to write what waits in its buffers, as the interpreter does. As a program this file is that
process: it takes cases from standard input and gives back what became of them.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

# Where a stream of a case leads.
PIPE, CLOSED, FULL, NO_READER = "pipe", "closed", "full", "no reader"
READER_LEAVES, TERMINAL = "reader leaves", "terminal"
# In the place of a forward pass: when HillInfer is taken off the model.
AFTER = -1
_LIMIT_SECONDS = 120
_ENOUGH = 2


@dataclass(frozen=True)
class Case:
    """One command: its arguments, where its streams lead, and what strikes it when.

    `strike` is a name in the table of strikes and `forward` the number of the model's forward pass
    that it comes before, or AFTER. `touches` is what it acts on.
    """

    arguments: tuple[str, ...]
    stdin: bytes | None = b""
    stdout: str = PIPE
    stderr: str = PIPE
    umask: int = 0o022
    strike: str | None = None
    forward: int = 0
    touches: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """What a shell sees; the status is negative for a signal that killed, None for a hang."""

    status: int | None
    out: str
    err: str

    @property
    def last_line(self):
        lines = self.err.splitlines()
        return lines[-1] if lines else ""


class Forked:
    """The process with everything imported, from the side of the tests."""

    def __init__(self, python, model):
        self._process = subprocess.Popen(
            [*python, __file__, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, *arguments, **changes):
        pickle.dump(Case(tuple(map(str, arguments)), **changes), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def _send(number):
    def strike(touches):
        os.kill(os.getpid(), number)

    return strike


def _raise(make):
    def strike(touches):
        raise make()

    return strike


def _no_memory():
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _limit_memory(touches):
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(1 << 28)


def _become_a_file(touches):
    shutil.rmtree(touches)
    Path(touches).write_text("")


def _no_room(touches):
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))


STRIKES = {
    "SIGINT": _send(signal.SIGINT),
    "SIGTERM": _send(signal.SIGTERM),
    "SIGHUP": _send(signal.SIGHUP),
    "EIO": _raise(lambda: OSError(errno.EIO, "Input/output error", "/some/file")),
    "EMFILE": _raise(lambda: OSError(errno.EMFILE, "Too many open files")),
    "MemoryError": _raise(MemoryError),
    "torch memory": _raise(_no_memory),
    "RLIMIT_AS": _limit_memory,
    "thread": _raise(lambda: RuntimeError("can't start new thread")),
    "defect": _raise(lambda: KeyError("nobody thought of this")),
    "remove": shutil.rmtree,
    "become a file": _become_a_file,
    "RLIMIT_FSIZE": _no_room,
}


def _arm(case):
    """Let the case's strike come before a forward pass of any causal model, or after them all."""
    if case.forward == AFTER:
        from hillinfer.hf.attach import Attachment

        taken_off = Attachment.detach

        def detach(attachment):
            Attachment.detach = taken_off
            STRIKES[case.strike](case.touches)
            taken_off(attachment)

        Attachment.detach = detach
        return
    from torch.nn.modules.module import register_module_forward_pre_hook

    passes = 0

    def before(module, args):
        nonlocal passes
        if type(module).__name__.endswith("ForCausalLM"):
            passes += 1
            if passes == case.forward:
                STRIKES[case.strike](case.touches)

    register_module_forward_pre_hook(before)


def _lead(stream):
    """Return the descriptor that the child writes to and the one read here, None for none."""
    if stream in (PIPE, READER_LEAVES, NO_READER):
        reading, writing = os.pipe()
        if stream == NO_READER:
            os.close(reading)
            return writing, None
        return writing, reading
    if stream == TERMINAL:
        reading, writing = os.openpty()
        return writing, reading
    return (os.open("/dev/full", os.O_WRONLY), None) if stream == FULL else (None, None)


def _become_command(case, ends):
    os.umask(case.umask)
    os.environ.update(case.environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        getattr(sys, name).flush() if number else None
        if ends[number] is None:
            os.close(number)
            setattr(sys, name, None)
        else:
            os.dup2(ends[number], number)
            mode = "w" if number else "r"
            errors = "backslashreplace" if number == 2 else "strict"
            # As Python makes them at its start.
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", getattr(sys, name))
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
    if case.strike is not None:
        _arm(case)


def _watch(process, readers, case):
    """Collect what the child writes and return its end."""
    text = dict.fromkeys((1, 2), b"")
    status, until = None, time.monotonic() + _LIMIT_SECONDS
    watched = select.poll()
    for reading in readers.values():
        watched.register(reading, select.POLLIN)
    names = {reading: number for number, reading in readers.items()}
    while names and time.monotonic() < until:
        for reading, _ in watched.poll(1000):
            try:
                piece = os.read(reading, 1 << 16)
            except OSError:
                # How a terminal says that nobody writes to it any more.
                piece = b""
            number = names[reading]
            text[number] += piece
            leaves = (case.stdout, case.stderr)[number - 1] == READER_LEAVES
            if not piece or (leaves and len(text[number]) >= _ENOUGH):
                watched.unregister(reading)
                os.close(reading)
                del names[reading]
    while status is None and time.monotonic() < until:
        ended, raw = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(raw)
        else:
            time.sleep(0.01)
    if status is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    for reading in names:
        os.close(reading)
    return Ended(status, text[1].decode(errors="replace"), text[2].decode(errors="replace"))


def _serve(model):
    """Take cases until standard input ends; return the arguments in a child."""
    # What importing makes stays; looking through it again and again takes a quarter of the time.
    gc.disable()
    import torch

    from hillinfer.models.loader import load_model
    from hillinfer_bench.cli.programs import main_of

    torch.set_num_threads(1)
    # Whatever loading and drawing import is there for every child.
    loaded = load_model(model)
    torch.zeros(2).softmax(-1).multinomial(1)
    loaded.tokenizer("a")
    for command in ("generate", "decode"):
        main_of([command])
    import hillinfer.cli.run  # noqa: F401

    # Collecting garbage would touch, and so copy, every page of a child.
    gc.collect()
    gc.freeze()
    gc.enable()
    cases, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    while True:
        try:
            case = pickle.load(cases)
        except EOFError:
            return None
        (out, out_reader), (err, err_reader) = _lead(case.stdout), _lead(case.stderr)
        inside = None
        if case.stdin is not None:
            file = os.memfd_create("stdin")
            os.write(file, case.stdin)
            os.lseek(file, 0, os.SEEK_SET)
            inside = file
        process = os.fork()
        if process == 0:
            for one in (cases, results):
                one.detach()
            for one in (out_reader, err_reader):
                if one is not None:
                    os.close(one)
            # Above what the standard streams may take.
            ends = [None if one is None else _moved(one) for one in (inside, out, err)]
            os.closerange(3, min(one for one in (*ends, 1000) if one is not None))
            _become_command(case, ends)
            for one in ends:
                if one is not None:
                    os.close(one)
            return case.arguments
        for one in (inside, out, err):
            if one is not None:
                os.close(one)
        readers = {n: one for n, one in ((1, out_reader), (2, err_reader)) if one is not None}
        pickle.dump(_watch(process, readers, case), results)
        results.flush()


def _end(status):
    """End as the interpreter does, but for its modules, whose taking apart takes a second."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.write(2, f"Exception ignored: {error}\n".encode())
            status = 120
    os._exit(status or 0)


def _moved(descriptor):
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 900)
    os.close(descriptor)
    return moved


if __name__ == "__main__":
    # The module's classes under the name that the tests know.
    sys.modules["forked"] = sys.modules["__main__"]
    Case.__module__ = Ended.__module__ = "forked"
    _arguments = _serve(sys.argv[1])
    if _arguments is not None:
        from hillinfer_bench.cli.programs import main_of

        try:
            main_of(_arguments)(_arguments)
        except SystemExit as ended:
            _end(ended.code)
        except BaseException:
            traceback.print_exc()
            _end(1)
