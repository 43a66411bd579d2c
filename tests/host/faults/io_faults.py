# SPDX-License-Identifier: Apache-2.0
"""One run per I/O call of a generation and way it can fail: right tokens or a clear error."""

from __future__ import annotations

import errno
import faulthandler
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fault_scenarios import Scenario, unseen
from faulty_calls import FAULTS, HARMLESS, Fault, FaultyCalls, Injection
from lives import DocumentLife, Life, Places

from hillinfer.errors import HillInferError
from hillinfer.storage.drive_calls import DriveCalls

HANG_SECONDS = 120
FEW_CALLS = 40
_TRANSFERS = frozenset({"pwrite", "preadv"})
_PLACE = re.compile(r"\d+ bytes at \d+ of .")
# A new cache in the same process, quickly.
AGAIN = DocumentLife(Scenario(document_tokens=130, new_tokens=3), "again")


class Outcome(StrEnum):
    """How a run with a fault ended."""

    RIGHT = "right"
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
    reached: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_fault: dict[str, Counter[str]] = field(default_factory=dict)
    leftovers: int = 0
    open_files: int = 0
    longest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def injections(counts: Counter[str], per_call: int, most: int) -> list[Injection]:
    """Return faults for every call of every kind, spread evenly where they are more than `most`.

    Parameters
    ----------
    counts
        Calls of each kind in a run without faults.
    per_call
        Faults of one call where a kind has many calls; a kind with few gets every fault.
    most
        Most runs.
    """
    every = []
    # A seed of its own: fixed runs, but no pattern that sampling every so many could hide.
    chance = random.Random(0)
    for kind, count in sorted(counts.items()):
        faults = FAULTS[kind]
        each = len(faults) if count <= FEW_CALLS else min(per_call, len(faults))
        for index in range(count):
            every += [Injection(kind, index, fault) for fault in chance.sample(faults, each)]
    if len(every) <= most:
        return every
    return [every[i * len(every) // most] for i in range(most)]


def run_io_faults(
    life: Life,
    places: Places,
    per_call: int,
    most: int,
    below: DriveCalls,
    on_run: Callable[[int, int], None] = lambda done, total: None,
) -> Tally:
    """Live a life once per fault and count how each ended.

    Parameters
    ----------
    life, places
        What runs, and where.
    per_call, most
        As in `injections`.
    below
        The file system under the faults.
    on_run
        Called with the number of runs so far and in all.
    """
    model, again = life.scenario.model(), AGAIN.scenario.model()
    clean = FaultyCalls(below=below)
    expected = life.live(model, places, clean, unseen)
    places.remove_session()
    expected_again = AGAIN.live(again, places, DriveCalls(), unseen)
    tally = Tally(life.name, calls=dict(clean.counts))
    tally.possible = sum(count * len(FAULTS[kind]) for kind, count in clean.counts.items())
    plan = injections(clean.counts, per_call, most)
    for number, injection in enumerate(plan, start=1):
        open_before = _open_files()
        calls = FaultyCalls(injection, below=below)
        # A hang is no outcome: it ends the harness with the place where it hangs.
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        started = time.perf_counter()
        outcome, said = _outcome(life, model, places, injection, calls, expected)
        if outcome is Outcome.REFUSED:
            tokens = AGAIN.live(again, places, DriveCalls(), unseen)
            if tokens != expected_again:
                outcome, said = Outcome.WRONG, f"a new cache after it: {tokens}"
            elif injection.fault in HARMLESS:
                outcome = Outcome.UNCLEAR
        faulthandler.cancel_dump_traceback_later()
        tally.longest_seconds = max(tally.longest_seconds, time.perf_counter() - started)
        tally.runs += 1
        tally.reached += calls.hits > 0
        tally.outcomes[outcome] += 1
        key = f"{injection.kind} {injection.fault}"
        tally.by_fault.setdefault(key, Counter())[outcome] += 1
        places.remove_session()
        tally.leftovers += len(places.names())
        tally.open_files += max(0, _open_files() - open_before)
        if outcome in (Outcome.WRONG, Outcome.UNCLEAR):
            tally.wrong.append(f"{injection}: {said}")
        on_run(number, len(plan))
    return tally


def _outcome(
    life: Life,
    model: Any,
    places: Places,
    injection: Injection,
    calls: FaultyCalls,
    expected: list[int],
) -> tuple[Outcome, str]:
    came: list[int] = []
    try:
        tokens = life.live(model, places, calls, came.append)
    except HillInferError as error:
        # What came before the error must be right, too.
        if came != expected[: len(came)]:
            return Outcome.WRONG, f"{came} before {error}"
        clear = is_clear(str(error), injection, places)
        return (Outcome.REFUSED if clear else Outcome.UNCLEAR), str(error)
    except Exception as error:
        return Outcome.UNCLEAR, repr(error)
    return (Outcome.RIGHT if tokens == expected else Outcome.WRONG), str(tokens)


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
    yield "reached", sum(tally.reached for tally in tallies)
    for outcome in Outcome:
        yield outcome.value, sum(tally.outcomes[outcome] for tally in tallies)
    yield "leftovers", sum(tally.leftovers for tally in tallies)
    yield "open_files", sum(tally.open_files for tally in tallies)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
