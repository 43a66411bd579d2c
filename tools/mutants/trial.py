# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that must fail of a mutant, and returns whether they did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

from mutants.copied_project import CopiedProject, CopyError
from mutants.mutant import Mutant

# Tests that hang are told from slow ones by what they took without a fault.
_LEAST_SECONDS, _TIMES_SLOWER = 180.0, 6.0
# What pytest ends with: all passed, some failed; anything else is a call that went wrong.
_PASSED, _FAILED = 0, 1
# One test that is not there, and pytest runs none of the others.
_NOT_CALLED_RIGHT = 4


class Outcome(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    LIVED = "lived"
    SKIPPED = "skipped"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Case:
    """One test that ran.

    Parameters
    ----------
    file, name
        As in a node id.
    outcome
        `passed`, `failed` or `skipped`.
    seconds
        How long it took.
    """

    file: str
    name: str
    outcome: str
    seconds: float

    def is_meant_by(self, killer: str) -> bool:
        """Say whether a test file or node id names this test, with any of its parameters."""
        file, _, name = killer.partition("::")
        return self.file == file and (not name or name in (self.name, self.name.split("[")[0]))


@dataclass(frozen=True)
class Result:
    """What became of one mutant.

    Parameters
    ----------
    mutant
        Which.
    outcome
        What.
    seconds
        How long that took.
    reason
        Why, where it is neither killed nor lived.
    """

    mutant: Mutant
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""


def run_tests(
    copied: CopiedProject, tests: Iterable[str], limit: float | None, *options: str
) -> tuple[int | None, list[Case]]:
    """Run tests in a copy.

    Parameters
    ----------
    copied
        Where.
    tests
        Files or node ids; those that are not there are left out.
    limit
        Seconds after which they are ended; None for no limit.
    options
        Of pytest.

    Returns
    -------
    What pytest ended with, None where it had to be ended, and the tests that ran.
    """
    tests = list(tests)
    with tempfile.TemporaryDirectory() as folder:
        record, said = Path(folder) / "record.xml", Path(folder) / "said"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        command += ["-o", "junit_family=xunit1", f"--junit-xml={record}"]
        command += [f"--basetemp={folder}/temporary", *tests]
        # A group of its own: what tests started ends with them.
        with said.open("wb") as errors:
            running = subprocess.Popen(
                command,
                cwd=copied.folder,
                env=copied.environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            status: int | None = running.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        if status == _NOT_CALLED_RIGHT:
            lines = said.read_text(errors="replace").splitlines()
            there = [one for one in tests if not _is_told_missing(copied.folder, one, lines)]
            if there and len(there) < len(tests):
                return run_tests(copied, there, limit, *options)
        return status, _cases(record) if record.exists() else []


def _is_told_missing(folder: Path, test: str, lines: Iterable[str]) -> bool:
    """Say whether pytest said that a test is not there."""
    return any(
        line.endswith((f"not found: {test}", f"not found: {folder / test}")) for line in lines
    )


class Unharmed:
    """How the tests that must fail of mutants do without one.

    Parameters
    ----------
    cases
        All of them, run on unchanged sources.
    variants
        Of the native library, that this processor has.
    """

    def __init__(self, cases: list[Case], variants: Collection[str] = ()) -> None:
        self._cases = cases
        self._variants = variants

    def verdict(self, mutant: Mutant) -> Result | None:
        """Return what speaks against trying a mutant; None where nothing does."""
        if mutant.variant is not None and mutant.variant not in self._variants:
            reason = f"this processor has no {mutant.variant}"
            return Result(mutant, Outcome.SKIPPED, reason=reason)
        outcomes: set[str] = set()
        for killer in mutant.killers:
            own = {case.outcome for case in self._cases if case.is_meant_by(killer)}
            if not own:
                return Result(mutant, Outcome.UNCLEAR, reason=f"there is no test {killer}")
            if "failed" in own:
                reason = f"{killer} fails without the fault as well"
                return Result(mutant, Outcome.UNCLEAR, reason=reason)
            outcomes |= own
        if outcomes == {"skipped"}:
            return Result(mutant, Outcome.SKIPPED, reason="this machine skips all of its tests")
        return None

    def limit(self, mutant: Mutant) -> float:
        """Return after how many seconds a mutant's tests hang."""
        usual = sum(
            case.seconds
            for case in self._cases
            if any(case.is_meant_by(killer) for killer in mutant.killers)
        )
        return _LEAST_SECONDS + _TIMES_SLOWER * usual


def try_mutant(copied: CopiedProject, mutant: Mutant, unharmed: Unharmed) -> Result:
    """Run a mutant's tests with its fault in place, until one fails."""
    against = unharmed.verdict(mutant)
    if against is not None:
        return against
    started = time.monotonic()
    try:
        with copied.changed(mutant):
            status, cases = run_tests(copied, mutant.killers, unharmed.limit(mutant), "-x")
    except (CopyError, ValueError) as error:
        return Result(mutant, Outcome.UNCLEAR, reason=str(error))
    seconds = time.monotonic() - started
    if status is None:
        return Result(mutant, Outcome.TIMED_OUT, seconds, "its tests hang")
    if status == _PASSED:
        return Result(mutant, Outcome.LIVED, seconds)
    # Below 0 is the signal that ended Python: the fault was seen, if roughly.
    if status < 0 or (status == _FAILED and any(case.outcome == "failed" for case in cases)):
        return Result(mutant, Outcome.KILLED, seconds)
    return Result(mutant, Outcome.UNCLEAR, seconds, f"pytest ended with {status}: no test ran")


def _cases(record: Path) -> list[Case]:
    cases = []
    for case in ElementTree.parse(record).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "passed"
        if kinds & {"failure", "error"}:
            outcome = "failed"
        elif "skipped" in kinds:
            outcome = "skipped"
        seconds = float(case.get("time", 0))
        cases.append(Case(case.get("file", ""), case.get("name", ""), outcome, seconds))
    return cases
