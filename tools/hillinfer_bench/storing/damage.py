# SPDX-License-Identifier: Apache-2.0
"""What failing calls and flipped bits cost a store: time, and never a wrong byte."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads
from hillinfer.native.structures import ReadWay
from hillinfer.store.keys import UNIT_BYTES, ExtentShape
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
_FILES = {
    "store.json",
    "pool-0.kv",
    "owners",
    "index.sqlite",
    "index.sqlite-wal",
    "index.sqlite-shm",
    "index.broken",
}


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
    places
        How many kills or failing calls met which step.
    """

    runs: int = 0
    wrong_tokens: int = 0
    lost_chunks: int = 0
    leaks: int = 0
    slow_openings: int = 0
    errors: int = 0
    slowest_opening: float = 0.0
    what: list[str] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

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

    Attributes
    ----------
    made
        Calls so far.
    """

    def __init__(self, number: int, act: Callable[[str], None]) -> None:
        self.made = 0
        self.number = number
        self._act = act

    def count(self, name: str) -> None:
        """Count a call, and do what is to be done at it."""
        self.made += 1
        if self.made == self.number:
            self._act(name)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open, as a `DriveCalls` does."""
        self.count("open")
        return super().open(path, flags, mode)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write, as a `DriveCalls` does."""
        self.count("pwrite")
        return super().pwrite(descriptor, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read, as a `DriveCalls` does."""
        self.count("preadv")
        return super().preadv(descriptor, into, offset)

    def read_many(self, way: ReadWay, reads: Reads, address: int) -> NDArray[np.int64] | None:
        """Read, as a `DriveCalls` does."""
        self.count("read_many")
        return super().read_many(way, reads, address)

    def read_to_blocks(
        self, way: ReadWay, reads: Reads, address: int, rows: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Read and place rows, unless it is its turn."""
        self.count("read_to_blocks")
        return super().read_to_blocks(way, reads, address, rows)

    def allocate(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Take room, as a `DriveCalls` does."""
        self.count("allocate")
        super().allocate(descriptor, offset, byte_count)

    def fdatasync(self, descriptor: int) -> None:
        """Wait, as a `DriveCalls` does."""
        self.count("fdatasync")
        super().fdatasync(descriptor)


def look_at_room(store: Store, place: Path, losses: Losses) -> None:
    """Note what a store still holds for nobody, and whether it is larger than it may be.

    Nobody else uses it.
    """
    facts = store.statistics()
    if facts["writing"] or facts["leases"]:
        losses.note("leaks", str(facts))
    held = facts["chunk_bytes"] + facts["free_bytes"]
    if held != sum(file.units for file in store.files) * UNIT_BYTES:
        losses.note("leaks", f"{held} bytes in chunks and free")
    left = {file.name for file in place.iterdir()} - _FILES
    if left:
        losses.note("leaks", f"{sorted(left)} beside the store's files")
    taken = sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())
    if taken > store.places.size:
        losses.note("leaks", f"{taken} bytes of {store.places.size} on the drive")


# --- Calls that fail ---


def failing_calls(place: Path, on_progress: Callable[[int], None]) -> Losses:
    """Let every drive call of storing, finding, evicting and rebuilding fail once.

    Whoever asks gets no error, and never other bytes.

    Parameters
    ----------
    place
        Where the stores are made.
    on_progress
        Called with the failing calls so far.
    """
    losses = Losses()
    place.mkdir(parents=True)
    for name in ("new", "full", "rebuilt"):
        number = 0
        while True:
            number += 1
            made = 0
            for code in (errno.EIO, errno.ENOSPC):
                calls = CountedCalls(number, _failing(code))
                _fail_once(place / name, name, calls, losses)
                made = max(made, calls.made)
                if calls.made >= number:
                    losses.runs += 1
                    losses.places[name] = losses.places.get(name, 0) + 1
            on_progress(losses.runs)
            if made < number:
                break
        shutil.rmtree(place / name)
    return losses


def _fail_once(own: Path, scene: str, calls: CountedCalls, losses: Losses) -> None:
    """Store and find a prompt where one call fails, then look at the store without failures.

    Scenes: a store in its first use, one that must evict for each chunk, one whose index is lost.
    """
    # Before it is full: what is judged may not give way.
    if scene == "new" or (scene == "rebuilt" and calls.number % 8 == 1):
        shutil.rmtree(own, ignore_errors=True)
    if not own.exists():
        Store.create(own, STORE_BYTES)
        with Store(own) as store:
            for seed in range(40 if scene == "full" else 0):
                put(store, SPACE, prompt(1000 + seed, 2048), step=1024)
    if scene == "rebuilt":
        with Store(own) as store:
            put(store, SPACE, prompt(2, 3000), step=1024)
        for file in own.glob("index.sqlite*"):
            file.unlink()
    # In a full store each is a new prompt.
    ids = prompt(1 if scene == "new" else 5000 + calls.number, 3000)
    told = f"{scene}, call {calls.number}"
    try:
        # So that what is stored last stays, which is judged.
        with Store(own, calls=calls) as store:
            for _ in range(2):
                put(store, SPACE, ids, step=1024)
                with contextlib.suppress(OSError, WrongBytesError):
                    check(store, SPACE, ids)
    except StoreError:
        # Of opening, which says that no store is to be had.
        pass
    except WrongTokensError as error:
        losses.note("wrong_tokens", f"{told}: {error}")
    except Exception as error:
        losses.note("errors", f"{told}: {type(error).__name__} {error}")
    try:
        with Store(own) as store:
            if scene == "rebuilt" and check(store, SPACE, prompt(2, 3000)) != 2944:
                losses.note("lost_chunks", f"{told}: what was stored before is gone")
            check(store, SPACE, ids)
            if put(store, SPACE, ids) != 2944 or check(store, SPACE, ids) != 2944:
                losses.note("lost_chunks", f"{told}: the store takes no more")
            store.room.collect()
            look_at_room(store, own, losses)
    except Exception as error:
        losses.note("errors", f"after {told}: {type(error).__name__} {error}")


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
    place.mkdir(parents=True)
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
