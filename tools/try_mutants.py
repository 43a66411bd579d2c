# SPDX-License-Identifier: Apache-2.0
"""Put one fault after the other into a copy of the sources; tests must fail of each.

Writes build/reports/mutants.json and ends with 1 where a mutant lived or nothing can be said of it.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from hillinfer.native.library import native_library  # noqa: E402
from mutants.copied_project import CopiedProject, CopyError  # noqa: E402
from mutants.mutant import Mutant  # noqa: E402
from mutants.steps.passes import EQUIVALENT  # noqa: E402
from mutants.table import MUTANTS  # noqa: E402
from mutants.trial import Outcome, Result, Unharmed, run_tests, try_mutant  # noqa: E402


def tried(mutants: Sequence[Mutant], project: Path, jobs: int) -> list[Result]:
    """Try mutants, so many at a time, and return what became of each, in order.

    Parameters
    ----------
    mutants
        Which.
    project
        Whose sources are copied.
    jobs
        How many copies are at work.

    Raises
    ------
    CopyError
        Where the unchanged copy cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = CopiedProject.of(project, Path(folder) / "0")
        killers = sorted({killer for mutant in mutants for killer in mutant.killers})
        print(f"{len(mutants)} mutants; first their tests without a fault", flush=True)
        _, cases = run_tests(first, killers, None)
        unharmed = Unharmed(cases, native_library().variants)
        copies: queue.SimpleQueue[CopiedProject] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(first.again(Path(folder) / str(number)) if number else first)

        def one(mutant: Mutant) -> Result:
            copied = copies.get()
            try:
                result = try_mutant(copied, mutant, unharmed)
            finally:
                copies.put(copied)
            after = f": {result.reason}" if result.reason else ""
            print(f"{result.outcome} {mutant.name} ({result.seconds:.0f} s){after}", flush=True)
            return result

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Return what the file holds."""

    def names(*outcomes: Outcome) -> list[str]:
        return [result.mutant.name for result in results if result.outcome in outcomes]

    return {
        "mutants": len(results),
        "killed": len(names(Outcome.KILLED, Outcome.TIMED_OUT)),
        "lived": names(Outcome.LIVED),
        "timed_out": names(Outcome.TIMED_OUT),
        "skipped": names(Outcome.SKIPPED),
        "unclear": names(Outcome.UNCLEAR),
        "equivalent": [asdict(one) for one in EQUIVALENT],
        "results": [
            {
                "name": result.mutant.name,
                "fault": result.mutant.fault,
                "file": result.mutant.file,
                "killers": list(result.mutant.killers),
                "seconds": round(result.seconds, 1),
                "outcome": result.outcome.value,
                "reason": result.reason,
            }
            for result in results
        ],
    }


def main() -> None:
    """Try them all, or those that are named, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/reports/mutants.json")
    parser.add_argument("--jobs", type=int, default=1, help="copies at work at a time")
    parser.add_argument("--only", nargs="+", default=[""], help="words in names of mutants")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if any(word in one.name for word in given.only)]
    if not chosen:
        raise SystemExit(f"no mutant's name contains {' or '.join(given.only)}")
    try:
        results = tried(chosen, ROOT, max(1, given.jobs))
    except CopyError as error:
        raise SystemExit(str(error)) from error
    found = report(results)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['killed']} of {found['mutants']} killed; see {given.out}")
    for outcome in ("lived", "unclear", "skipped"):
        if found[outcome]:
            print(f"{outcome}: {', '.join(found[outcome])}")
    raise SystemExit(bool(found["lived"] or found["unclear"]))


if __name__ == "__main__":
    main()
