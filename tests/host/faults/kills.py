# SPDX-License-Identifier: Apache-2.0
"""Processes killed at random moments, and what the next start finds."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fault_scenarios import CHUNK
from faulty_calls import FaultyCalls, KillingCalls
from going_on import Witness
from lives import Life, Places

from hillinfer.drive.calls import DriveCalls
from hillinfer.drive.files import ScratchPath, sweep
from hillinfer.generate.answering import Generation

HANG_SECONDS = 120
_SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
_WEIGHTS = (8, 1, 1)
_CATCHABLE = {signal.SIGINT, signal.SIGTERM}


@dataclass
class Deaths:
    """What a series of kills came to."""

    life: str
    kills: int = 0
    by_signal: Counter[str] = field(default_factory=Counter)
    ended_before: int = 0
    tokens_before: int = 0
    sessions_found: int = 0
    swept: int = 0
    wrong_tokens: int = 0
    leftovers: int = 0
    failures: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Child:
    """A forked process that sends its tokens, one line each, and how it ended.

    Parameters
    ----------
    work
        Called in the child with a function that sends a token; its return value is sent, too.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], list[int]]) -> None:
        self._from, into = os.pipe()
        sys.stdout.flush()
        # An interrupt inside fork itself would break Python's own locks in the child, and no user
        # can send one to a process that has not begun.
        signal.pthread_sigmask(signal.SIG_BLOCK, _CATCHABLE)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._from)
            _as_child(work, into)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _CATCHABLE)
        os.close(into)
        self._said = b""

    def send(self, number: int) -> None:
        """Send a signal; harmless where the child has ended."""
        os.kill(self.pid, number)

    def read(self, seconds: float) -> bool:
        """Take in what the child says for some time; False once it has ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self._from], [], [], left)
            if ready:
                piece = os.read(self._from, 65536)
                if not piece:
                    return False
                self._said += piece
        return True

    def wait(self) -> int:
        """Return the exit status, negative for a signal; a child that hangs is an error."""
        if self.read(HANG_SECONDS):
            self.send(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise TimeoutError(f"a child hung for {HANG_SECONDS} s")
        _, status = os.waitpid(self.pid, 0)
        os.close(self._from)
        return os.waitstatus_to_exitcode(status)

    @property
    def tokens(self) -> list[int]:
        """The tokens that came one by one."""
        return [int(line) for line in self._lines() if line.isdigit()]

    @property
    def result(self) -> list[int] | None:
        """What the work returned, None where it did not get there."""
        whole = [line for line in self._lines() if line.startswith("[")]
        return json.loads(whole[0]) if whole else None

    @property
    def error(self) -> str:
        """Why the work failed, empty where it did not."""
        return "\n".join(line for line in self._lines() if not line.isdigit() and line[:1] != "[")

    def _lines(self) -> list[str]:
        # A line that was cut off by a kill does not count.
        return self._said.decode(errors="replace").split("\n")[:-1]


def run_kills(
    life: Life,
    model: Any,
    places: Places,
    kills: int,
    seed: int,
    on_kill: Callable[[int, int], None] = lambda done, total: None,
) -> Deaths:
    """Kill processes at random moments, start again after each and compare.

    Half of them die by a signal at a random time, half by SIGKILL right before or after a random
    one of their I/O calls. A second process lives beside them all the time.

    Parameters
    ----------
    life, model, places
        What the processes do, with what and where; no other thread may run in this process.
    kills, seed
        How many, and of which random moments.
    on_kill
        Called with the number of kills so far and in all.
    """
    chance = random.Random(seed)
    # What is loaded at the first use is loaded once, here, and not in every child.
    witness = Witness()
    life.scenario.run(model, places.cold_dir, DriveCalls(), witness)
    _expect(
        all(witness.shadow_bytes) or not life.scenario.streams,
        f"{life.name} streams no shadow: {witness.shadow_bytes}",
    )
    _expect(_threads() == 1, f"{_threads()} threads run, and fork copies only one")
    deaths = Deaths(life.name)
    started = time.perf_counter()
    first = Child(lambda send: _counted(life, model, places, Witness(send)))
    _expect(first.wait() == 0, first.error or "the run without a kill failed")
    seconds = time.perf_counter() - started
    assert first.result
    *expected, calls = first.result
    assert expected
    places.remove_session()
    neighbour = Neighbour(life, model, places)
    try:
        _expect(neighbour.answers(expected), "the neighbour's first answer is wrong")
        for number in range(1, kills + 1):
            at_call = number % 2
            killing = KillingCalls(chance.randrange(calls), chance.choice(["before", "after"]))
            child = _victim(life, model, places, killing if at_call else DriveCalls())
            by = signal.SIGKILL
            if not at_call:
                alive = child.read(chance.uniform(0, seconds))
                by = chance.choices(_SIGNALS, _WEIGHTS)[0]
                if alive:
                    child.send(by)
            status = child.wait()
            deaths.kills += 1
            deaths.by_signal["at a call" if at_call else by.name] += 1
            deaths.ended_before += status == 0
            _check_victim(deaths, child, status, by, expected)
            _start_again(deaths, life, model, places, expected, neighbour)
            on_kill(number, kills)
        _expect(neighbour.answers(expected), "the neighbour's last answer is wrong", deaths)
    finally:
        neighbour.end()
    for directory in (places.cold_dir, places.sessions):
        sweep(directory)
    deaths.leftovers += len(places.names())
    return deaths


class Neighbour:
    """A process that lives through all the kills, holding scratch and a read document."""

    def __init__(self, life: Life, model: Any, places: Places) -> None:
        self._places = places
        self._asked, self._ask = os.pipe()
        self._told, self._tell = os.pipe()
        self._held = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _reset_signals()
            self._serve(life, model)
        os.close(self._held[1])
        self.held = json.loads(_line(self._held[0]))

    def is_untouched(self) -> bool:
        """Say whether its scratch is where it was."""
        return set(self.held) <= set(self._places.names())

    def answers(self, expected: list[int]) -> bool:
        """Let it answer from the document it read at first, and compare."""
        os.write(self._ask, b"?\n")
        return bool(json.loads(_line(self._told)) == expected)

    def end(self) -> None:
        """End it without a warning."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _serve(self, life: Life, model: Any) -> None:
        try:
            calls = DriveCalls()
            held = [
                ScratchPath.make_directory(self._places.sessions, calls),
                ScratchPath.make_file(self._places.cold_dir, calls),
            ]
            os.write(self._held[1], (json.dumps([one.path.name for one in held]) + "\n").encode())
            with life.scenario.attach(model, self._places.cold_dir, calls) as attachment:
                generation = Generation(model, life.scenario.cache(attachment), CHUNK)
                life.scenario.read(generation)
                while _line(self._asked):
                    tokens = life.scenario.answer_again(generation)
                    os.write(self._tell, (json.dumps(tokens) + "\n").encode())
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _victim(life: Life, model: Any, places: Places, calls: DriveCalls) -> Child:
    return Child(lambda send: life.live(model, places, calls, Witness(send)))


def _check_victim(
    deaths: Deaths, child: Child, status: int, by: signal.Signals, expected: list[int]
) -> None:
    came = child.tokens
    deaths.tokens_before += len(came)
    if came != expected[: len(came)] or (status == 0 and child.result != expected):
        deaths.wrong_tokens += 1
        deaths.wrong.append(f"before the end ({status}): {came}")
    # An interrupt ends a process as an exception does, even while it tells of another.
    interrupted = by is signal.SIGINT and (not child.error or "KeyboardInterrupt" in child.error)
    if status > 0 and not interrupted:
        deaths.failures.append(f"ended with {status} by itself: {child.error}")


def _start_again(
    deaths: Deaths,
    life: Life,
    model: Any,
    places: Places,
    expected: list[int],
    neighbour: Neighbour,
) -> None:
    deaths.sessions_found += places.session.exists()
    before = len(places.names())
    started = time.perf_counter()
    child = Child(lambda send: life.restart(model, places, Witness(send)))
    status = child.wait()
    deaths.longest_seconds = max(deaths.longest_seconds, time.perf_counter() - started)
    if status != 0:
        deaths.failures.append(f"starting again ended with {status}: {child.error}")
    elif child.result != expected:
        deaths.wrong_tokens += 1
        deaths.wrong.append(f"after starting again: {child.result}")
    if not neighbour.is_untouched():
        deaths.failures.append("the living process lost its scratch")
    after = places.names()
    deaths.swept += before - len(after)
    deaths.leftovers += len(set(after) - set(neighbour.held))
    places.remove_session()


def _counted(life: Life, model: Any, places: Places, witness: Witness) -> list[int]:
    """Return all tokens, and behind them how many I/O calls were made."""
    calls = FaultyCalls()
    return [*life.live(model, places, calls, witness), calls.counts.total()]


def _as_child(work: Callable[[Callable[[int], None]], list[int]], into: int) -> None:
    """Do the work, say how it went and end, never returning to the parent's code."""
    status = 1
    try:
        _reset_signals()
        result = work(lambda token_id: _say(into, str(token_id)))
        _say(into, json.dumps(result))
        status = 0
    except BaseException:
        _say(into, traceback.format_exc())
    finally:
        os._exit(status)


def _reset_signals() -> None:
    # A process that was started in the background ignores interrupts, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _CATCHABLE)


def _say(into: int, text: str) -> None:
    os.write(into, f"{text}\n".encode())


def _line(descriptor: int) -> str:
    said = b""
    while not said.endswith(b"\n"):
        piece = os.read(descriptor, 1)
        if not piece:
            break
        said += piece
    return said.decode()


def _threads() -> int:
    """Return how many threads run; one that was joined may take a moment to be gone."""
    until = time.monotonic() + 5
    while (found := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return found


def _expect(holds: bool, message: str, deaths: Deaths | None = None) -> None:
    if holds:
        return
    if deaths is None:
        raise AssertionError(message)
    deaths.failures.append(message)
