# SPDX-License-Identifier: Apache-2.0
"""One run per I/O call of a generation and way it can fail: right tokens or a clear error."""

from __future__ import annotations

import faulthandler
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from fault_scenarios import Scenario
from faulty_calls import FAULTS, HARMLESS, FaultyCalls, Injection

from hillinfer.errors import HillInferError
from hillinfer.storage.drive_calls import DriveCalls

HANG_SECONDS = 120
# How an error names what failed: the file, the place and bytes of a transfer, and the directory.
_TRANSFER = (
    r"could not (read|write) \d+ bytes at \d+ of .+ in {directory}.* \(\d+ bytes done\): .+; "
)
_OTHER = r".*{directory}.*: .+; "
# A new cache in the same process, quickly.
AGAIN = Scenario("again", document_tokens=130, new_tokens=3)


class Outcome(StrEnum):
    """How a run with a fault ended."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    UNCLEAR = "unclear"


@dataclass
class Tally:
    """What the runs of one scenario came to."""

    scenario: str
    calls: dict[str, int] = field(default_factory=dict)
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
    for kind, count in sorted(counts.items()):
        faults = FAULTS[kind]
        each = len(faults) if count <= 40 else min(per_call, len(faults))
        turn = cycle(faults)
        for index in range(count):
            every += [Injection(kind, index, fault) for fault in islice(turn, each)]
    if len(every) <= most:
        return every
    return [every[i * len(every) // most] for i in range(most)]


def run_io_faults(
    scenario: Scenario,
    cold_dir: Path,
    per_call: int,
    most: int,
    below: DriveCalls,
    on_run: Callable[[int, int], None] = lambda done, total: None,
) -> Tally:
    """Run a scenario once per fault and count how each ended.

    Parameters
    ----------
    scenario, cold_dir
        What runs, and where.
    per_call, most
        As in `injections`.
    below
        The file system under the faults.
    on_run
        Called with the number of runs so far and in all.
    """
    model, again = scenario.model(), AGAIN.model()
    clean = FaultyCalls(below=below)
    expected = scenario.run(model, cold_dir, clean)
    expected_again = AGAIN.run(again, cold_dir, FaultyCalls())
    tally = Tally(scenario.name, calls=dict(clean.counts))
    plan = injections(clean.counts, per_call, most)
    for number, injection in enumerate(plan, start=1):
        open_before = _open_files()
        calls = FaultyCalls(injection, below=below)
        # A hang is no outcome: it ends the harness with the place where it hangs.
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        started = time.perf_counter()
        outcome, said = _outcome(scenario, model, cold_dir, calls, expected)
        if outcome is Outcome.REFUSED:
            tokens = AGAIN.run(again, cold_dir, FaultyCalls())
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
        tally.leftovers += len(list(cold_dir.iterdir()))
        tally.open_files += max(0, _open_files() - open_before)
        if outcome in (Outcome.WRONG, Outcome.UNCLEAR):
            tally.wrong.append(f"{injection}: {said}")
        on_run(number, len(plan))
    return tally


def _outcome(
    scenario: Scenario, model: Any, cold_dir: Path, calls: FaultyCalls, expected: list[int]
) -> tuple[Outcome, str]:
    came: list[int] = []
    try:
        tokens = scenario.run(model, cold_dir, calls, came.append)
    except HillInferError as error:
        # What came before the error must be right, too.
        if came != expected[: len(came)]:
            return Outcome.WRONG, f"{came} before {error}"
        return (Outcome.REFUSED if is_clear(str(error), cold_dir) else Outcome.UNCLEAR), str(error)
    except Exception as error:
        return Outcome.UNCLEAR, repr(error)
    return (Outcome.RIGHT if tokens == expected else Outcome.WRONG), str(tokens)


def is_clear(message: str, directory: Path) -> bool:
    """Say whether an error names file and bytes, or at least the directory, and the fix."""
    place = re.escape(str(directory))
    forms = (_TRANSFER, _OTHER) if "could not" not in message else (_TRANSFER,)
    return any(re.match(form.format(directory=place), message, re.DOTALL) for form in forms)


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
