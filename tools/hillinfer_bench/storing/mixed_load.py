# SPDX-License-Identifier: Apache-2.0
"""Processes that read, store and evict in one store for a while; now and then one is killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np

from hillinfer.store.maintenance import Parts
from hillinfer.store.prefix import WrongBytesError
from hillinfer.store.store import Store
from hillinfer_bench.storing.damage import SPACE, STORE_BYTES, Losses, look_at_room
from hillinfer_bench.storing.made_prompts import WrongTokensError, check, prompt, put

# More prompts than the store has room for, some asked for much more often than others.
_PROMPTS = 60
_MOST_TOKENS = 4000
# Leases that a process holds while it does other things.
_MOST_HELD = 4
# What a process takes when it has done everything once is what it takes for good.
_WARM_SHARE = 0.3
_GROWN_BYTES = 24 << 20
_ENDING_SECONDS = 60.0


@dataclass
class Work:
    """What one process did.

    Parameters
    ----------
    lookups, found_tokens, stored_tokens, evicted_chunks
        As it counted.
    grown_descriptors, grown_bytes
        Open files and resident memory at its end, over those when it was warm.
    wrong, failure
        What came back wrong, and what failed, in words; empty where nothing did.
    """

    lookups: int = 0
    found_tokens: int = 0
    stored_tokens: int = 0
    evicted_chunks: int = 0
    grown_descriptors: int = 0
    grown_bytes: int = 0
    wrong: str = ""
    failure: str = ""


@dataclass
class MixedLoad:
    """What all of them did, and what was left.

    Parameters
    ----------
    processes, seconds
        How many at a time, and for how long.
    killed
        How many were killed; each was followed by another one.
    work
        Of those that came to their end.
    losses
        What went wrong; all of it must be 0.
    """

    processes: int
    seconds: float
    killed: int = 0
    work: list[Work] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)


def mixed_load(
    place: Path,
    processes: int,
    seconds: float,
    kill_seconds: float,
    advance: Callable[[int], None] = lambda done: None,
) -> MixedLoad:
    """Let processes use one store, kill one now and then, and look at what is left.

    Parameters
    ----------
    place
        Where the store is made.
    processes, seconds
        How many at a time, and for how long.
    kill_seconds
        Time between kills.
    advance
        Called with the whole seconds that have passed.
    """
    Store.create(place, STORE_BYTES)
    with Store(place):
        pass
    told = MixedLoad(processes, seconds)
    numbers = np.random.default_rng(1)
    stop = time.time() + seconds
    with ExitStack() as running:
        own = [_Worker(place, seed, stop) for seed in range(processes)]
        running.callback(_end_all, own, told)
        following, kill_at = processes, time.time() + kill_seconds
        while (now := time.time()) < stop:
            if now >= kill_at:
                victim = int(numbers.integers(processes))
                own[victim].kill()
                told.killed += 1
                own[victim] = _Worker(place, following, stop)
                following, kill_at = following + 1, now + kill_seconds
            advance(int(seconds - (stop - now)))
            time.sleep(min(0.05, max(0.0, stop - now)))
    told.losses.runs = told.killed
    for work in told.work:
        if work.wrong:
            told.losses.note("wrong_tokens", work.wrong)
        if work.failure:
            told.losses.note("errors", work.failure)
        if work.grown_descriptors > 0:
            told.losses.note("leaks", f"{work.grown_descriptors} open files more than when warm")
        if work.grown_bytes > _GROWN_BYTES:
            told.losses.note("leaks", f"{work.grown_bytes >> 20} MiB more than when warm")
    _look(place, told.losses)
    return told


def _end_all(workers: list[_Worker], told: MixedLoad) -> None:
    for one in workers:
        one.end(told)


def _look(place: Path, losses: Losses) -> None:
    with Store(place) as store:
        look_at_room(store, place, losses)
        wrong = store.verify(Parts.ALL).wrong
        if wrong:
            losses.note("wrong_tokens", f"{wrong} chunks are not as they were written")
    left = list((place / "owners").iterdir())
    if left:
        losses.note("leaks", f"{len(left)} processes that ended are still entered")


class _Worker:
    """One process, and the pipe that it tells its work by."""

    def __init__(self, place: Path, seed: int, stop: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(
            target=work_until, args=(place, seed, stop, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self, told: MixedLoad) -> None:
        """Wait for its end and take what it tells."""
        if self._pipe.poll(_ENDING_SECONDS):
            try:
                told.work.append(self._pipe.recv())
            except EOFError:
                told.losses.note("errors", "a process ended without a word")
        else:
            told.losses.note("errors", "a process does not end")
        self.kill()


def work_until(place: Path, seed: int, stop: float, pipe: Connection) -> None:
    """Read and store prompts until a time, in seconds since 1970; send a `Work`."""
    done = Work()
    try:
        _work(place, np.random.default_rng(seed), stop, done)
    except (WrongTokensError, WrongBytesError) as error:
        done.wrong = str(error)
    except Exception as error:
        done.failure = f"{type(error).__name__}: {error}"
    pipe.send(done)


def _work(place: Path, numbers: np.random.Generator, stop: float, done: Work) -> None:
    warm_at = time.time() + _WARM_SHARE * (stop - time.time())
    warm: tuple[int, int] | None = None
    with ExitStack() as leases, Store(place) as store:
        held = leases.enter_context(ExitStack())
        while time.time() < stop:
            # One of few prompts more often than one of many; some begin alike.
            number = int(_PROMPTS * numbers.random() ** 2)
            tokens = int(numbers.integers(64, _MOST_TOKENS))
            ids = prompt(number // 2, tokens)
            if number % 2:
                ids = ids[: tokens // 2] + prompt(1000 + number, tokens - tokens // 2)
            if numbers.random() < 0.6:
                done.found_tokens += check(store, SPACE, ids)
            else:
                done.stored_tokens += put(store, SPACE, ids, step=1024)
            if numbers.random() < 0.1 and (found := store.find(SPACE, ids)) is not None:
                held.enter_context(found)
            if numbers.random() < 0.1 / _MOST_HELD:
                held.close()
            done.lookups += 1
            if warm is None and time.time() > warm_at:
                warm = _descriptors(), _resident_bytes()
        held.close()
        if warm is not None:
            done.grown_descriptors = _descriptors() - warm[0]
            done.grown_bytes = _resident_bytes() - warm[1]
        done.evicted_chunks = store.counts.evicted_chunks
        done.failure = store.counts.last_failure


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
