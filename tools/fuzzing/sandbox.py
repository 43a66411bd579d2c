# SPDX-License-Identifier: Apache-2.0
"""Runs inputs in forked processes with limits, so that none of them ends the fuzzer."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing.verdict import Kind, Verdict, of_error

# A folder with the input and one for everything else; returns where the input worked.
Try = Callable[[Path, Path], None]
Write = Callable[[Path], None]

_STACKS_FILE = "stacks.txt"
_FRAME = re.compile(r'(?<=File ")[^"\n]+(?=")')


@dataclass(frozen=True)
class Limits:
    """What one input may take.

    Parameters
    ----------
    cpu_seconds, wall_seconds
        Time of all its threads, and on the clock; a busy machine stretches the second.
    peak_bytes
        Resident memory more than the process had before.
    address_bytes
        Address space more than it had before; what asks for more is told that there is none.
    """

    cpu_seconds: int = 20
    wall_seconds: int = 120
    peak_bytes: int = 512 << 20
    address_bytes: int = 3 << 30


class Sandbox:
    """Forks a process for some inputs at a time, and another one where that dies.

    The process that makes this has imported all that inputs need, and has no other threads.

    Parameters
    ----------
    scratch
        A folder for everything that inputs read and write.
    limits
        For each input.
    """

    def __init__(self, scratch: Path, limits: Limits) -> None:
        self._scratch = scratch
        self._limits = limits

    def run(self, tries: Sequence[tuple[Write, Try]]) -> Iterator[Verdict]:
        """Yield a verdict for each of some inputs, in their order."""
        begun = 0
        while begun < len(tries):
            for verdict in self._batch(tries[begun:]):
                begun += 1
                yield verdict

    def _batch(self, tries: Sequence[tuple[Write, Try]]) -> Iterator[Verdict]:
        """Yield the verdicts of the first inputs, up to one that ends its process."""
        folder = Path(tempfile.mkdtemp(prefix="batch-", dir=self._scratch))
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(tries, folder, writing, self._limits)
        os.close(writing)
        done = 0
        try:
            for line in _lines(reading, self._limits.wall_seconds + 20):
                told = json.loads(line)
                done += 1
                yield Verdict(Kind(told["kind"]), told["what"], told["where"])
        finally:
            os.close(reading)
            killed = _ended(pid, seconds=5)
            if done < len(tries):
                verdict = _of_death(killed, folder / _STACKS_FILE)
            shutil.rmtree(folder, ignore_errors=True)
        if done < len(tries):
            yield verdict


def _lines(descriptor: int, seconds: float) -> Iterator[bytes]:
    """Yield lines until the other end closes or says nothing for some time."""
    said = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        piece = os.read(descriptor, 65_536) if ready else b""
        if not piece:
            return
        *lines, said = (said + piece).split(b"\n")
        yield from lines


def _ended(pid: int, seconds: float) -> int:
    """Return the status of a process that is about to end, or is made to."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def _of_death(status: int, stacks: Path) -> Verdict:
    told = stacks.read_text(errors="replace") if stacks.exists() else ""
    # The stack of a time-out, newest call first; of several threads the last is the main one.
    last = told.rpartition("most recent call first")[2].splitlines()[1:]
    product = [line.strip() for line in last if "/hillinfer" in line]
    where = _short(product[0]).replace('"', "") if product else ""
    parts = where.removeprefix("File ").split(", ")
    if len(parts) > 1:
        where = f"{parts[0]}:{parts[1].split()[-1]}"
    innermost = _short(last[0].strip()) if last else ""
    if status in (-signal.SIGXCPU, -signal.SIGKILL, _TIMED_OUT):
        return Verdict(Kind.HANG, f"too long: {innermost}", where)
    if status < 0:
        return Verdict(Kind.CRASH, f"{signal.Signals(-status).name}: {innermost}", where)
    return Verdict(Kind.CRASH, f"exit {status}: {_short(told)[-300:]}", where)


def _short(frames: str) -> str:
    """Leave of each file's name what is the same on every machine."""
    return _FRAME.sub(lambda found: "/".join(Path(found[0]).parts[-2:]), frames)


# What faulthandler ends a process with.
_TIMED_OUT = 1
_BROKEN = 3


def _child(tries: Iterable[tuple[Write, Try]], folder: Path, writing: int, limits: Limits) -> None:
    """Run inputs and end; never returns to the parent's code."""
    status = _BROKEN
    try:
        stacks = (folder / _STACKS_FILE).open("w")
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.enable(stacks, all_threads=False)
        # An unlimited stack lets a deep recursion in C take all memory before it fails.
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        faulthandler.register(signal.SIGXCPU, stacks, all_threads=False, chain=True)
        gc.freeze()
        for number, (write, attempt) in enumerate(tries):
            place = folder / str(number)
            verdict = _limited(write, attempt, place, limits, stacks)
            told = {"kind": verdict.kind, "what": verdict.what, "where": verdict.where}
            os.write(writing, json.dumps(told).encode() + b"\n")
            shutil.rmtree(place, ignore_errors=True)
        status = 0
    except BaseException:
        with (folder / _STACKS_FILE).open("a") as stacks:
            traceback.print_exc(file=stacks)
    finally:
        os._exit(status)


def _limited(write: Write, attempt: Try, place: Path, limits: Limits, stacks: Any) -> Verdict:
    from hillinfer.system.machine import peak_rss_bytes, reset_peak_rss

    given, other = place / "input", place / "other"
    given.mkdir(parents=True)
    other.mkdir()
    write(given)
    names = _tree(given)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(spent.ru_utime + spent.ru_stime) + 1 + limits.cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
    address = _address_bytes() + limits.address_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address, resource.RLIM_INFINITY))
    tempfile.tempdir = str(other)
    reset_peak_rss()
    before = peak_rss_bytes()
    faulthandler.dump_traceback_later(limits.wall_seconds, exit=True, file=stacks)
    held = _held()
    try:
        attempt(given, other)
        verdict = Verdict(Kind.WORKED)
    except BaseException as error:
        verdict = of_error(error)
        # Frames keep what they hold alive, and some errors are raised by loading a module late.
        error.__traceback__ = None
        del error
    left = _leaks(held, _tree(other), names, _tree(given))
    faulthandler.cancel_dump_traceback_later()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    grown = peak_rss_bytes() - before
    if verdict.fine and grown > limits.peak_bytes:
        return Verdict(Kind.MEMORY, f"grew: {grown >> 20} MiB more", verdict.where)
    if verdict.fine and left:
        return Verdict(Kind.LEAK, f"left: {left}", verdict.where)
    return verdict


def _address_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _held() -> dict[str, int]:
    """Return how many descriptors, threads and children this process has."""
    children = Path("/proc/self/task", str(os.getpid()), "children")
    return {
        "descriptors": sum(map(_is_held, Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "processes": len(children.read_text().split()) if children.exists() else 0,
    }


def _is_held(descriptor: Path) -> bool:
    try:
        # Pictures keep their fonts open for the next one.
        return not str(descriptor.readlink()).endswith(".ttf")
    except FileNotFoundError:
        # That of listing itself.
        return False


def _tree(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def _leaks(held: dict[str, int], left: list[str], names: list[str], now: list[str]) -> str:
    """Name what an input left behind; threads get a moment to end."""
    until = time.monotonic() + 1
    found = _held()
    if any(found[name] > count for name, count in held.items()):
        gc.collect()
    while any(found[name] > count for name, count in held.items()) and time.monotonic() < until:
        time.sleep(0.01)
        found = _held()
    more = [f"{found[name] - count} {name}" for name, count in held.items() if found[name] > count]
    if left:
        more.append(f"files {', '.join(left)[:200]}")
    if now != names:
        more.append(f"other files in the input {set(now) ^ set(names)}"[:200])
    return "; ".join(more)
