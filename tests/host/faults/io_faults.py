# SPDX-License-Identifier: Apache-2.0
"""One run per I/O call of a generation and way it can fail: right tokens or a clear error."""

from __future__ import annotations

import errno
import faulthandler
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low
from typing import Any

from fault_scenarios import Scenario
from faulty_calls import FAULTS, HARMLESS, Fault, FaultyCalls, Injection
from going_on import GoingOn, Witness
from lives import DocumentLife, Life, Places

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import HillInferError

HANG_SECONDS = 120
CLEAN_RUNS = 5
TRIES = 20
_TRANSFERS = frozenset({"pwrite", "preadv"})
_PLACE = re.compile(r"\d+ bytes at \d+ of .")
# A new cache in the same process, quickly.
AGAIN = DocumentLife(Scenario(document_tokens=130, new_tokens=2), "again")


class Outcome(StrEnum):
    """How a run with a fault ended."""

    RIGHT = "right"
    RECOVERED = "recovered"
    REFUSED = "refused"
    WRONG = "wrong"
    UNCLEAR = "unclear"


@dataclass
class Tally:
    """What the runs of one life came to."""

    life: str
    calls: dict[str, int] = field(default_factory=dict)
    possible: int = 0
    runs: int = 0
    planned: int = 0
    reached: int = 0
    used_again: int = 0
    shadow_write_bytes: int = 0
    shadow_read_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_fault: dict[str, Counter[str]] = field(default_factory=dict)
    leftovers: int = 0
    open_files: int = 0
    longest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def injections(counts: Counter[str], few: int, most: int = sys.maxsize) -> list[Injection]:
    """Return one fault per call, the kinds of fault dealt evenly over the calls of a kind.

    Parameters
    ----------
    counts
        Calls of each kind in a run without faults.
    few
        A kind with no more calls than this gets every fault at each of them.
    most
        Most runs; of more, an even selection.
    """
    every = []
    # A seed of its own: fixed runs, but no pattern that dealing in turn could hide.
    chance = random.Random(0)
    for kind, count in sorted(counts.items()):
        faults = FAULTS[kind]
        deck: list[Fault] = []
        for index in range(count):
            if count <= few:
                every += [Injection(kind, index, fault) for fault in faults]
                continue
            deck = deck or chance.sample(faults, len(faults))
            every.append(Injection(kind, index, deck.pop()))
    if len(every) <= most:
        return every
    return [every[i * len(every) // most] for i in range(most)]


def run_io_faults(
    life: Life,
    places: Places,
    below: DriveCalls,
    few: int = 0,
    most: int = sys.maxsize,
    on_run: Callable[[int, int], None] = lambda done, total: None,
    plan: Sequence[Injection] = (),
    tries: int = TRIES,
    clean_runs: int = CLEAN_RUNS,
) -> Tally:
    """Live a life once per fault and count how each ended.

    Parameters
    ----------
    life, places
        What runs, and where.
    below
        The file system under the faults.
    few, most
        As in `injections`.
    on_run
        Called with the number of runs so far and in all.
    plan
        The faults, in place of one per call.
    tries
        Runs for a fault at a call that not every run makes.
    clean_runs
        Runs without a fault, which must be alike and tell how many calls there are.
    """
    model, again = life.scenario.model(), AGAIN.scenario.model()
    tally = Tally(life.name)
    expected, counts = _clean_runs(tally, life, model, places, below, clean_runs)
    expected_again = AGAIN.live(again, places, DriveCalls(), Witness())
    tally.calls = dict(counts)
    tally.possible = sum(count * len(FAULTS[kind]) for kind, count in counts.items())
    plan = plan or injections(counts, few, most)
    tally.planned = len(plan)
    for number, injection in enumerate(plan, start=1):
        for _ in range(tries):
            open_before = _open_files()
            calls = FaultyCalls(injection, below=below)
            # A hang is no outcome: it ends the harness with the place where it hangs.
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            started = time.perf_counter()
            witness = GoingOn()
            outcome, said = _outcome(life, model, places, injection, calls, expected, witness)
            if witness.errors or outcome is Outcome.REFUSED:
                tokens = AGAIN.live(again, places, DriveCalls(), Witness())
                if tokens != expected_again:
                    outcome, said = Outcome.WRONG, f"a new cache after it: {tokens}"
            faulthandler.cancel_dump_traceback_later()
            tally.longest_seconds = max(tally.longest_seconds, time.perf_counter() - started)
            places.remove_session()
            for error in witness.errors:
                _forget_frames(error)
            tally.leftovers += len(places.names())
            tally.open_files += max(0, _open_files() - open_before)
            # Whether or not the fault came: a run must never be wrong.
            if outcome in (Outcome.WRONG, Outcome.UNCLEAR):
                tally.wrong.append(f"{injection}: {said}")
            if calls.hits or outcome in (Outcome.WRONG, Outcome.UNCLEAR):
                break
        tally.runs += 1
        tally.reached += calls.hits > 0
        tally.used_again += witness.used_again
        tally.outcomes[outcome] += 1
        key = f"{injection.kind} {injection.fault}"
        tally.by_fault.setdefault(key, Counter())[outcome] += 1
        on_run(number, len(plan))
    return tally


def _clean_runs(
    tally: Tally, life: Life, model: Any, places: Places, below: DriveCalls, count: int
) -> tuple[list[int], Counter[str]]:
    """Return the right tokens, and the calls of each kind that most runs make.

    When a write in the background ends decides what else fits in DRAM, and so what is read.
    """
    runs, witness, expected = [], Witness(), []
    for _ in range(count):
        clean, witness = FaultyCalls(below=below), Witness()
        tokens = life.live(model, places, clean, witness)
        places.remove_session()
        assert expected in ([], tokens), "two runs without faults differ"
        expected = tokens
        runs.append(clean.counts)
    tally.shadow_write_bytes, tally.shadow_read_bytes = witness.shadow_bytes
    # A life that claims to stream and does not would prove nothing.
    if life.scenario.streams and not all(witness.shadow_bytes):
        raise AssertionError(f"{life.name} streams no shadow: {witness.shadow_bytes}")
    kinds = set().union(*runs)
    return expected, Counter({kind: median_low(run[kind] for run in runs) for kind in kinds})


def _outcome(
    life: Life,
    model: Any,
    places: Places,
    injection: Injection,
    calls: FaultyCalls,
    expected: list[int],
    witness: GoingOn,
) -> tuple[Outcome, str]:
    outcome, said = Outcome.RIGHT, ""
    try:
        tokens = life.live(model, places, calls, witness)
        if tokens != expected:
            return Outcome.WRONG, f"{tokens} after {witness.errors}"
        if witness.errors:
            outcome, said = Outcome.RECOVERED, str(witness.errors)
    except HillInferError as error:
        witness.errors.append(error)
        outcome, said = Outcome.REFUSED, str(error)
    except Exception as error:
        return Outcome.UNCLEAR, repr(error)
    # What came before, between and after errors must be right, too.
    each = life.scenario.new_tokens
    for question, came in witness.came.items():
        if came != expected[question * each :][: len(came)]:
            return Outcome.WRONG, f"{came} for question {question}: {witness.errors}"
    for error in witness.errors:
        if injection.fault in HARMLESS or not is_clear(str(error), injection, places):
            return Outcome.UNCLEAR, str(error)
    return outcome, said


def is_clear(message: str, injection: Injection, places: Places) -> bool:
    """Say whether an error names the directory, for a transfer file and bytes, why, and the fix."""
    said, _, fix = message.rpartition("; ")
    named = any(str(place) in said for place in (places.cold_dir, places.sessions))
    # Where a drive does nothing at all there is no reason but that.
    reason = "" if injection.fault is Fault.NOTHING else _reason(injection.fault)
    counted = injection.kind not in _TRANSFERS or _PLACE.search(said) is not None
    return named and counted and reason in said and bool(fix)


def _reason(fault: Fault) -> str:
    number = getattr(errno, fault.value, None)
    return "a harmless fault has no reason" if number is None else os.strerror(number)


def totals(tallies: list[Tally]) -> Iterator[tuple[str, int]]:
    """Yield the sums of several scenarios by name."""
    yield "io_faults", sum(tally.runs for tally in tallies)
    yield "unreached", sum(tally.planned - tally.reached for tally in tallies)
    yield "used_again", sum(tally.used_again for tally in tallies)
    for outcome in Outcome:
        yield outcome.value, sum(tally.outcomes[outcome] for tally in tallies)
    yield "leftovers", sum(tally.leftovers for tally in tallies)
    yield "open_files", sum(tally.open_files for tally in tallies)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what an error keeps as long as it is there, such as states that wait in a file."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
