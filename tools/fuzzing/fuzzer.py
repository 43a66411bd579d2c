# SPDX-License-Identifier: Apache-2.0
"""Makes inputs, tries them, and counts their verdicts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing.fuzz_input import Files, FuzzInput
from fuzzing.sandbox import Limits, Sandbox
from fuzzing.target import Target
from fuzzing.verdict import FINDINGS, Kind, Verdict

_BATCH = 25
# Of findings with one cause, so many are kept.
_KEPT = 2


@dataclass
class Finding:
    """Inputs that all met one defect.

    Parameters
    ----------
    kind, what, where
        Of the first.
    target, seed, number
        Which input that was.
    count
        How many there were.
    files
        Where the first ones are kept, for `--replay`.
    """

    kind: Kind
    what: str
    where: str
    target: str
    seed: int
    number: int
    count: int = 0
    files: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """What became of the inputs of a run."""

    seed: int
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        """All inputs tried."""
        return sum(counts.total() for counts in self.kinds.values())

    def count(self, made: FuzzInput, verdict: Verdict, keep: Path, seeds: Sequence[Files]) -> None:
        """Take in one verdict, and keep the input where there is something to mend."""
        self.kinds.setdefault(made.target, Counter())[verdict.kind] += 1
        if verdict.fine:
            return
        key = f"{made.target} {verdict.signature}"
        found = self.findings.setdefault(
            key,
            Finding(verdict.kind, verdict.what, verdict.where, made.target, made.seed, made.number),
        )
        found.count += 1
        if len(found.files) < _KEPT:
            file = keep / f"{made.name}.json"
            made.save(file, f"{verdict.kind}: {verdict.what}", seeds)
            found.files.append(str(file))

    def as_json(self) -> dict[str, Any]:
        """Return the report."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "inputs": self.inputs,
            "worked": self._sum(Kind.WORKED),
            "refused": self._sum(Kind.REFUSED),
            "findings": {kind.value: self._sum(kind) for kind in FINDINGS},
            "targets": {
                name: {"inputs": counts.total(), **{kind: counts[kind] for kind in Kind}}
                for name, counts in self.kinds.items()
            },
            "found": [vars(one) for one in self.findings.values()],
        }

    def _sum(self, kind: Kind) -> int:
        return sum(counts[kind] for counts in self.kinds.values())


class Fuzzer:
    """Tries inputs of some targets.

    Parameters
    ----------
    targets
        Which.
    scratch, keep
        Folders for what inputs read and write, and for inputs that met a defect.
    seed
        Of all that is random.
    limits
        Of each input.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        scratch: Path,
        keep: Path,
        seed: int,
        limits: Limits | None = None,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._sandbox = Sandbox(scratch, limits or Limits())
        self._keep = keep
        self._seed = seed
        self._seeds: dict[str, list[Files]] = {}
        self.tally = Tally(seed)

    def seeds_of(self, name: str) -> list[Files]:
        """Return the valid inputs of a target, made once."""
        if name not in self._seeds:
            self._seeds[name] = self._targets[name].seeds()
        return self._seeds[name]

    def make(self, name: str, number: int) -> FuzzInput:
        """Return one of a target's inputs; the first ones are its seeds as they are."""
        target = self._targets[name]
        seeds = self.seeds_of(name)
        if number < len(seeds):
            return FuzzInput(name, self._seed, number, dict(seeds[number]))
        # By name and number, so that each input is the same in every run, whatever came before.
        rng = random.Random(f"{self._seed} {name} {number}")
        return FuzzInput(name, self._seed, number, target.mutate(rng, dict(rng.choice(seeds))))

    def run_counts(self, counts: Mapping[str, int], say: Callable[[str], None]) -> Tally:
        """Try so many inputs of each target."""
        started = time.monotonic()
        for name, count in counts.items():
            for first in range(0, count, _BATCH):
                self.verdicts(self.make(name, n) for n in range(first, min(count, first + _BATCH)))
            say(self._line(name))
        self.tally.seconds = time.monotonic() - started
        return self.tally

    def run_seconds(
        self, shares: Mapping[str, int], seconds: float, say: Callable[[str], None]
    ) -> Tally:
        """Try inputs for a time, a share of each target in turns."""
        started = said = time.monotonic()
        done: Counter[str] = Counter()
        least = min(shares.values())
        while time.monotonic() - started < seconds:
            for name, share in shares.items():
                batch = min(4 * _BATCH, max(1, _BATCH * share // (4 * least)))
                self.verdicts(self.make(name, done[name] + n) for n in range(batch))
                done[name] += batch
                if time.monotonic() - started >= seconds:
                    break
            if time.monotonic() - said > 20:
                said = time.monotonic()
                say(f"{said - started:.0f} s: {self.tally.inputs} inputs")
        self.tally.seconds = time.monotonic() - started
        return self.tally

    def replay(self, files: Sequence[Path]) -> list[tuple[Path, Verdict]]:
        """Try inputs that were kept."""
        kept = [FuzzInput.load(file, self.seeds_of) for file in files]
        return list(zip(files, self.verdicts(kept), strict=True))

    def verdicts(self, inputs: Iterable[FuzzInput]) -> list[Verdict]:
        """Try inputs and count what became of each."""
        made = list(inputs)
        tries = [(one.write, partial(self._targets[one.target].try_one)) for one in made]
        found = []
        for one, verdict in zip(made, self._sandbox.run(tries), strict=True):
            self.tally.count(one, verdict, self._keep, self.seeds_of(one.target))
            found.append(verdict)
        return found

    def _line(self, name: str) -> str:
        counts = self.tally.kinds.get(name, Counter())
        bad = sum(counts[kind] for kind in FINDINGS)
        return (
            f"{name}: {counts.total()} inputs, {counts[Kind.WORKED]} worked, "
            f"{counts[Kind.REFUSED]} refused, {bad} findings"
        )
