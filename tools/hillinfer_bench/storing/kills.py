# SPDX-License-Identifier: Apache-2.0
"""What killing processes costs a store: the time to open it, and nothing that was published."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

from hillinfer.store.pool_files import StoreError
from hillinfer.store.prefix import WrongBytesError
from hillinfer.store.store import Store
from hillinfer_bench.storing.damage import SPACE, STORE_BYTES, CountedCalls, Losses, look_at_room
from hillinfer_bench.storing.made_prompts import WrongTokensError, check, prompt, put

_TOKENS = 1500
_FOUND = _TOKENS // 64 * 64
_REOPEN_SECONDS = 1.0
# What was stored last stays. Others may give up what is new and takes little to compute.
_EVICTION = "lru"
# How often the index is lost, and before which call a process is killed at the latest.
_LOST_SHARE = 0.2
_REBUILD_CALLS, _WRITE_CALLS = 24, 120


def kills(place: Path, runs: int, seed: int, on_progress: Callable[[int], None]) -> Losses:
    """Kill two processes that write to one store, over and over, and look at what is left.

    Each is killed before a call of a random number, or after a random time: so in writing, in each
    step of a commit, in eviction, and while the index is made anew. What a process was at when a
    call killed it is counted; between two calls it was in a transaction of the index or computing.

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
        is_lost = numbers.random() < _LOST_SHARE
        if is_lost:
            for file in place.glob("index.sqlite*"):
                file.unlink()
        # Some write the same prompts.
        firsts = [following, following if numbers.random() < 0.3 else following + 1000]
        following += 2000
        # Making an index anew takes few calls.
        last = _REBUILD_CALLS if is_lost else _WRITE_CALLS
        children = [
            _forked_writer(place, first, int(numbers.integers(1, last))) for first in firsts
        ]
        deadline = time.monotonic() + float(numbers.uniform(0.02, 0.5))
        told = [_ended(child, pipe, deadline) for child, pipe in children]
        _look(place, [one.stored for one in told], losses)
        for one in told:
            losses.runs += one.is_killed
            if one.is_killed:
                losses.places[one.step] = losses.places.get(one.step, 0) + 1
            if one.error:
                losses.note("errors", one.error)
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
    def die(name: str) -> None:
        os.write(pipe, f"at {_step()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    calls = CountedCalls(kill_at, die)

    def clock() -> float:
        # A commit asks for the time when its bytes are on the drive and nobody finds them yet.
        calls.count("clock")
        return time.time()

    try:
        with _opened(place, calls, clock) as store:
            for number in range(first, first + 500):
                if put(store, SPACE, prompt(number, _TOKENS), step=256) == _FOUND:
                    os.write(pipe, f"{number}\n".encode())
    except BaseException as error:
        os.write(pipe, f"error {type(error).__name__} {error}\n".encode())
    finally:
        os._exit(0)


def _opened(place: Path, calls: CountedCalls, clock: Callable[[], float]) -> Store:
    """Open the store; where another process has it open without an index, wait for that one."""
    while True:
        try:
            # What was stored last stays: only older ones may be missing afterwards.
            return Store(place, eviction=_EVICTION, calls=calls, clock=clock)
        except StoreError as error:
            if "end them" not in str(error):
                raise
        time.sleep(0.01)


# What a process is at, by the innermost of these functions that it is in.
_STEPS = {
    "rebuild": "rebuild",
    "_known_database": "opening the index",
    "_blank": "giving room back",
    "clear_tombed": "giving room back",
    "evict": "evicting",
    "_publish": "commit",
    "publish": "commit, before its transaction",
    "ensure": "taking room on the drive",
    "_put": "writing rows",
    "_write_shadow": "writing shadows",
    "_find": "looking up",
    "_check": "opening a file",
}


def _step() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _STEPS:
            return _STEPS[frame.f_code.co_name]
        frame = frame.f_back
    return "opening or closing"


@dataclass(frozen=True)
class _Ended:
    """What an ended process said.

    Parameters
    ----------
    stored
        Numbers of prompts, in order.
    is_killed
        Whether a signal ended it.
    step
        What it was at.
    error
        What reached it; empty where nothing did.
    """

    stored: list[int]
    is_killed: bool
    step: str
    error: str


def _ended(child: int, pipe: int, deadline: float) -> _Ended:
    """Kill a process that still lives at some time; return what it said."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.002)
    else:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    with os.fdopen(pipe, "rb") as said:
        lines = said.read().decode().splitlines()
    return _Ended(
        [int(line) for line in lines if line.isdigit()],
        os.WIFSIGNALED(status),
        next((line[3:] for line in lines if line.startswith("at ")), "at any time"),
        "; ".join(line for line in lines if line.startswith("error ")),
    )


def _look(place: Path, told: list[list[int]], losses: Losses) -> None:
    started = time.perf_counter()
    with Store(place, eviction=_EVICTION) as store:
        seconds = time.perf_counter() - started
        losses.slowest_opening = max(losses.slowest_opening, seconds)
        if seconds > _REOPEN_SECONDS:
            losses.note("slow_openings", f"{seconds:.2f} s")
        look_at_room(store, place, losses)
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
