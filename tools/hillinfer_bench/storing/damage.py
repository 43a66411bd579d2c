# SPDX-License-Identifier: Apache-2.0
"""What kills, failing calls and flipped bits cost a store: time, and never a wrong byte."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.native.structures import ReadWay
from hillinfer.store.extent import UNIT_BYTES, ExtentShape
from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import StoredChunk, WrongBytesError
from hillinfer.store.store import Store
from hillinfer_bench.storing.made_prompts import (
    WrongTokensError,
    check,
    namespace,
    prompt,
    put,
)

SPACE = namespace()
# Small enough that eviction is under way all the time: some sixty chunks.
STORE_BYTES = 64 << 20
_TOKENS = 1500
_FOUND = _TOKENS // 64 * 64
_REOPEN_SECONDS = 1.0


@dataclass
class Losses:
    """What went wrong; all of it must be 0.

    Parameters
    ----------
    runs
        Kills, failing calls or flips.
    wrong_tokens
        Prompts that came back with other bytes.
    lost_chunks
        Prompts that were published and are not found.
    leaks
        Stores that did not give back what an ended process held, or took more than their size.
    slow_openings
        Openings after a kill that took longer than a second.
    errors
        Failures that reached whoever asked.
    slowest_opening
        In seconds.
    what
        The first few, in words.
    """

    runs: int = 0
    wrong_tokens: int = 0
    lost_chunks: int = 0
    leaks: int = 0
    slow_openings: int = 0
    errors: int = 0
    slowest_opening: float = 0.0
    what: list[str] = field(default_factory=list)

    def note(self, name: str, what: str) -> None:
        """Count one loss and keep what it was."""
        setattr(self, name, getattr(self, name) + 1)
        if len(self.what) < 10:
            self.what.append(f"{name}: {what}")


class CountedCalls(DriveCalls):
    """Does something at the call of a number, and passes all others on.

    Parameters
    ----------
    number
        Which call, 1 the first; none where 0.
    act
        What it does in place of that call.
    """

    def __init__(self, number: int, act: Callable[[str], None]) -> None:
        self.made = 0
        self._number = number
        self._act = act

    def _count(self, name: str) -> None:
        self.made += 1
        if self.made == self._number:
            self._act(name)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open, as a `DriveCalls` does."""
        self._count("open")
        return super().open(path, flags, mode)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write, as a `DriveCalls` does."""
        self._count("pwrite")
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read, as a `DriveCalls` does."""
        self._count("preadv")
        return super().preadv(descriptor, into, offset)

    def read_many(self, way: ReadWay, reads: Reads, address: int) -> NDArray[np.int64] | None:
        """Read, as a `DriveCalls` does."""
        self._count("read_many")
        return super().read_many(way, reads, address)

    def allocate(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Take room, as a `DriveCalls` does."""
        self._count("allocate")
        super().allocate(descriptor, offset, byte_count)

    def fdatasync(self, descriptor: int) -> None:
        """Wait, as a `DriveCalls` does."""
        self._count("fdatasync")
        super().fdatasync(descriptor)


def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills(place: Path, runs: int, seed: int, on_progress: Callable[[int], None]) -> Losses:
    """Kill two processes that write to one store, over and over, and look at what is left.

    Each is killed before a drive call of a random number, or after a random time: so in writing,
    in each step of a commit, in eviction, and while the index is made anew.

    Parameters
    ----------
    place
        Where the store is made.
    runs
        Kills.
    seed
        Of the random numbers.
    on_progress
        Called with the kills so far.
    """
    numbers, losses = np.random.default_rng(seed), Losses()
    Store.create(place, STORE_BYTES)
    with Store(place):
        pass
    following = 1
    while losses.runs < runs:
        if numbers.random() < 0.1:
            for file in place.glob("index.sqlite*"):
                file.unlink()
        # Some write the same prompts.
        firsts = [following, following if numbers.random() < 0.3 else following + 1000]
        following += 2000
        children = [_forked_writer(place, first, int(numbers.integers(1, 120))) for first in firsts]
        deadline = time.monotonic() + float(numbers.uniform(0.02, 0.5))
        told = [_ended(child, pipe, deadline) for child, pipe in children]
        losses.runs += len(children)
        _look(place, [seeds for seeds, _ in told], losses)
        for _, error in told:
            if error:
                losses.note("errors", error)
        on_progress(losses.runs)
    return losses


def _forked_writer(place: Path, first: int, kill_at: int) -> tuple[int, int]:
    """Start a process that stores prompts and tells their numbers; return it and its pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    _write_until_killed(place, first, kill_at, writing)
    return None


def _write_until_killed(place: Path, first: int, kill_at: int, pipe: int) -> NoReturn:
    try:
        # What was stored last stays: only older ones may be missing afterwards.
        with Store(place, "lru", calls=CountedCalls(kill_at, _die)) as store:
            for number in range(first, first + 500):
                if put(store, SPACE, prompt(number, _TOKENS), step=256) == _FOUND:
                    os.write(pipe, f"{number}\n".encode())
    except StoreError as error:
        # The other one makes the index anew, or uses it: a miss.
        if "end them" not in str(error):
            os.write(pipe, f"error {error}\n".encode())
    except BaseException as error:
        os.write(pipe, f"error {type(error).__name__} {error}\n".encode())
    finally:
        os._exit(0)


def _ended(child: int, pipe: int, deadline: float) -> tuple[list[int], str]:
    """Kill a process that still lives at some time; return what it said: numbers, and an error."""
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.002)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(pipe, "rb") as said:
        lines = said.read().decode().splitlines()
    errors = [line for line in lines if line.startswith("error ")]
    return [int(line) for line in lines if line.isdigit()], "; ".join(errors)


def _look(place: Path, told: list[list[int]], losses: Losses) -> None:
    started = time.perf_counter()
    with Store(place) as store:
        seconds = time.perf_counter() - started
        losses.slowest_opening = max(losses.slowest_opening, seconds)
        if seconds > _REOPEN_SECONDS:
            losses.note("slow_openings", f"{seconds:.2f} s")
        facts = store.statistics()
        if facts["writing"] or facts["leases"]:
            losses.note("leaks", str(facts))
        held = facts["chunk_bytes"] + facts["free_bytes"]
        if held != sum(file.units for file in store.files) * UNIT_BYTES:
            losses.note("leaks", f"{held} bytes in chunks and free")
        for seeds in told:
            # Older ones may have been evicted.
            for number in seeds[-2:]:
                try:
                    found = check(store, SPACE, prompt(number, _TOKENS))
                except (WrongTokensError, WrongBytesError) as error:
                    losses.note("wrong_tokens", f"prompt {number}: {error}")
                    continue
                if found != _FOUND:
                    losses.note("lost_chunks", f"prompt {number}: {found} of {_FOUND} tokens")
        if store.counts.failures:
            losses.note("errors", store.counts.last_failure)
    taken = sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())
    if taken > STORE_BYTES:
        losses.note("leaks", f"{taken} bytes of {STORE_BYTES} on the drive")


# --- Calls that fail ---


def failing_calls(place: Path, on_progress: Callable[[int], None]) -> Losses:
    """Let every drive call of storing and finding a prompt fail once, each in a store of its own.

    Whoever asks gets no error, and never other bytes.
    """
    losses, ids, number = Losses(), prompt(1, 3000), 0
    while True:
        number += 1
        for code in (errno.EIO, errno.ENOSPC):
            own = place / f"{number}-{code}"
            Store.create(own, STORE_BYTES)
            with Store(own):
                pass
            calls = CountedCalls(number, _failing(code))
            try:
                with Store(own, calls=calls) as store:
                    for _ in range(2):
                        put(store, SPACE, ids, step=1024)
                        with contextlib.suppress(OSError, WrongBytesError):
                            check(store, SPACE, ids)
            except StoreError:
                # Of opening, which says that no store is to be had.
                pass
            except WrongTokensError as error:
                losses.note("wrong_tokens", f"call {number}: {error}")
            except Exception as error:
                losses.note("errors", f"call {number}: {type(error).__name__} {error}")
            with Store(own) as store:
                try:
                    check(store, SPACE, ids)
                    if put(store, SPACE, ids) != 2944 or check(store, SPACE, ids) != 2944:
                        losses.note("lost_chunks", f"call {number}: the store takes no more")
                except Exception as error:
                    losses.note("errors", f"after call {number}: {type(error).__name__} {error}")
            shutil.rmtree(own)
            losses.runs += 1
        on_progress(losses.runs)
        if calls.made < number:
            return losses


def _failing(code: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    return fail


# --- Bits that flip ---


def flips(place: Path, runs: int, seed: int, on_progress: Callable[[int], None]) -> Losses:
    """Flip one bit of a store at a time, anywhere, and look whether a wrong byte comes back.

    Parameters as in `kills`.
    """
    numbers, losses = np.random.default_rng(seed), Losses()
    whole, damaged = place / "whole", place / "damaged"
    Store.create(whole, STORE_BYTES)
    first = prompt(1, 2500)
    prompts = [first, first[:1100] + prompt(2, 900), prompt(3, 1024)]
    with Store(whole) as store:
        for ids in prompts:
            put(store, SPACE, ids, step=4096)
        spans = [chunk.record.span for chunk in _chunks(store, prompts)]
    shape = ExtentShape.of(SPACE)
    while losses.runs < runs:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        span = spans[int(numbers.integers(len(spans)))]
        part, file, at = _place(numbers, damaged, span.offset, shape)
        _flip(file, at, int(numbers.integers(8)))
        losses.runs += 1
        try:
            with Store(damaged) as store:
                for ids in prompts:
                    with contextlib.suppress(OSError, WrongBytesError):
                        check(store, SPACE, ids)
        except StoreError:
            pass
        except WrongTokensError as error:
            losses.note("wrong_tokens", f"{part} at {at}: {error}")
        except Exception as error:
            losses.note("errors", f"{part} at {at}: {type(error).__name__} {error}")
        on_progress(losses.runs)
    return losses


def _chunks(store: Store, prompts: list[list[int]]) -> list[StoredChunk]:
    found = []
    for ids in prompts:
        prefix = store.find(SPACE, ids)
        assert prefix is not None
        with prefix:
            found += prefix.chunks
    return found


def _place(
    numbers: np.random.Generator, place: Path, begin: int, shape: ExtentShape
) -> tuple[str, Path, int]:
    """Return a part of a store, a file and a byte of it, each part as often as others."""
    pool, index = place / "pool-0.kv", place / "index.sqlite"
    parts = {
        "header": (begin, 2 * 4096),
        "ids": (begin + shape.body_at(0), 4096),
        "sums": (begin + shape.body_at(0) + 4096, shape.layers * 17 * 4),
        "shadow": (begin + shape.shadow_at(0), shape.layers * shape.shadow_bytes),
        "rows": (begin + shape.rows_at(0), shape.layers * shape.object_bytes),
    }
    name = str(numbers.choice([*parts, "index"]))
    if name == "index":
        return name, index, int(numbers.integers(index.stat().st_size))
    start, size = parts[name]
    return name, pool, start + int(numbers.integers(size))


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
