# SPDX-License-Identifier: Apache-2.0
"""Processes that read, store and evict in one store for a while; now and then one is killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
# What is said when a process has opened the store, and when it is to end.
_BEGUN, _END = "begun", "end"
# Leases that a process holds while it does other things.
_MOST_HELD = 4
# What a process takes when it has done everything once is what it takes for good.
_WARM_SHARE = 0.3
_GROWN_BYTES = 24 << 20
# However busy the machine is, a process has begun, and has ended, in this time.
_PATIENCE_SECONDS = 600.0
_LOOK_SECONDS = 0.05


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
        How many were killed while they had the store open; each was followed by another one.
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
        How many at a time, and for how long once all of them have the store open.
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
    with ExitStack() as running:
        own = [_Worker(place, seed, seconds) for seed in range(processes)]
        running.callback(_end_all, own, told)
        patience = time.monotonic() + _PATIENCE_SECONDS
        while not all(one.has_begun for one in own) and time.monotonic() < patience:
            time.sleep(_LOOK_SECONDS)
        began = time.monotonic()
        following, kill_at = processes, began + kill_seconds
        while (now := time.monotonic()) < began + seconds:
            victims = [at for at, one in enumerate(own) if one.has_begun] if now >= kill_at else []
            if victims:
                victim = int(numbers.choice(victims))
                own[victim].kill()
                told.killed += 1
                own[victim] = _Worker(place, following, began + seconds - now)
                following, kill_at = following + 1, now + kill_seconds
            advance(int(now - began))
            time.sleep(_LOOK_SECONDS)
    told.losses.runs = told.killed
    if not any(work.lookups for work in told.work):
        told.losses.note("errors", "no prompt was looked up")
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
        one.ask_to_end()
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

    def __init__(self, place: Path, seed: int, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=work_until, args=(place, seed, seconds, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._said: Work | None = None
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether it has the store open, or has come to its end without that."""
        if not self._has_begun and self._pipe.poll():
            # `end` tells of one that died without a word.
            with suppress(EOFError):
                self._hear()
        return self._has_begun

    def ask_to_end(self) -> None:
        """Let it end after the prompt that is under way, one at least."""
        with suppress(OSError):
            self._pipe.send(_END)

    def _hear(self) -> None:
        self._has_begun = True
        said = self._pipe.recv()
        if said != _BEGUN:
            self._said = said

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self, told: MixedLoad) -> None:
        """Wait for its end and take what it tells."""
        try:
            while self._said is None and self._pipe.poll(_PATIENCE_SECONDS):
                self._hear()
            if self._said is None:
                told.losses.note("errors", "a process does not end")
            else:
                told.work.append(self._said)
        except EOFError:
            told.losses.note("errors", "a process ended without a word")
        self.kill()


def work_until(place: Path, seed: int, seconds: float, pipe: Connection) -> None:
    """Read and store prompts until the pipe says so, in about so many seconds; send a `Work`."""
    done = Work()
    try:
        _work(place, np.random.default_rng(seed), seconds, done, pipe)
    except (WrongTokensError, WrongBytesError) as error:
        done.wrong = str(error)
    except Exception as error:
        done.failure = f"{type(error).__name__}: {error}"
    pipe.send(done)


def _work(
    place: Path, numbers: np.random.Generator, seconds: float, done: Work, pipe: Connection
) -> None:
    warm_at = time.monotonic() + _WARM_SHARE * seconds
    warm: tuple[int, int] | None = None
    with ExitStack() as leases, Store(place) as store:
        pipe.send(_BEGUN)
        held = leases.enter_context(ExitStack())
        while not done.lookups or not pipe.poll():
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
            if warm is None and time.monotonic() > warm_at:
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
