# SPDX-License-Identifier: Apache-2.0
"""Figures and goals of the other benchmarks, taken from their reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.system.files import read_plain
from hillinfer_bench.report.goal_record import (
    AtLeast,
    AtMost,
    GoalBound,
    GoalPoint,
    GoalRecord,
    judged,
    unjudged,
)

FIRST_TOKEN = "time to the first token: at most 1.1 times ordinary chunked prefill, KV in DRAM"
SHADOW_GROWTH = "selected rows fixed: decode time grows with the shadow's bytes and nothing else"
FLAT_MEMORY = "memory flat at M0 and what the report names, to 256k tokens"
SCORER = "scorer: at least 80% of what memory reads, INT8 and INT4 shadows"
DRIVE = "drive: at least 80% of what a reference reader reads"
BETA = "β chosen: at most 5% slower than the best measured"
# Who is compared with, and what is aimed at beside them.
_PEERS = {
    "transformers": "peers: ahead of transformers' own caches at every context from 4096 tokens",
    "llama.cpp": "peers: crossover with llama.cpp at 16384 tokens or below",
    "vllm": "peers: crossover with vLLM at 16384 tokens or below",
}
_AHEAD_FROM = 4096
_SCORER_MODES = ("int8", "int4")
_GOALLESS = "the report states no goals of its own: run it with this version"


@dataclass(frozen=True)
class OtherGoals:
    """What one report tells of goals.

    Parameters
    ----------
    file
        Name of the report.
    command
        That writes it.
    goals
        In words, stated where the report is not there.
    take
        Returns the records of a report that has no `goals`; raises KeyError, TypeError, ValueError
        or AttributeError where its form is another.
    """

    file: str
    command: str
    goals: tuple[str, ...]
    take: Callable[[Mapping[str, Any]], list[GoalRecord]]

    def records(self, found: Mapping[str, Any]) -> list[GoalRecord]:
        """Return the report's own records, where it has any, else those made of its figures."""
        if found.get("goals"):
            return [_own(one) for one in found["goals"]]
        return self.take(found)

    def unknown(self, reason: str) -> list[GoalRecord]:
        """Return a record of each goal with the reason why nothing is known."""
        return [GoalRecord(goal, None, reason, None, None) for goal in self.goals]


def _own(found: Mapping[str, Any]) -> GoalRecord:
    """Return a record that a report holds; where it is flagged, it is not met."""
    met = False if found["met"] and found["flagged"] else found["met"]
    row = found.get("row") or "no row is named"
    return GoalRecord(found["goal"], found["reached"], row, met, found["flagged"])


def _prefill_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    goal = found["goal"]
    points = [
        GoalPoint(row["seconds_ratio"], f"{row['contender']}, {row['tokens']} tokens")
        for row in found["rows"]
        if row["contender"] == goal["contender"]
    ]
    return [_verdict(FIRST_TOKEN, points, AtMost(goal["ratio_at_most"]))]


def _peers_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    records = []
    for family, goal in _PEERS.items():
        own = [one for one in found["comparisons"] if one["peer"].startswith(family)]
        for one in own:
            ahead = family == "transformers"
            name = f"{goal} ({one['ours']} beside {one['peer']})"
            records.append(_ahead(name, one) if ahead else _crossover(name, one))
        if not own:
            skipped = [
                f"{peer} was skipped: {why}"
                for peer, why in found["skipped"].items()
                if peer.startswith(family)
            ]
            reason = "; ".join(skipped) or f"nothing was compared with {family}"
            records.append(GoalRecord(goal, None, reason, None, None))
    return records


def _ahead(name: str, one: Mapping[str, Any]) -> GoalRecord:
    speedups = {int(context): ratio for context, ratio in one["speedups"].items()}
    flagged = [context for context in one["flagged"] if context >= _AHEAD_FROM]
    # Below the aim's contexts the worst is told where no other is there.
    own = {at: ratio for at, ratio in speedups.items() if at >= _AHEAD_FROM} or speedups
    context = min(own, key=lambda at: own[at])
    return GoalRecord(
        name, own[context], f"speed-up at {context} tokens", one["met"], bool(flagged)
    )


def _crossover(name: str, one: Mapping[str, Any]) -> GoalRecord:
    crossing = one["crossover"]
    ratios = ", ".join(f"{ratio:.2f}x at {at}" for at, ratio in one["speedups"].items())
    row = f"faster from: {crossing['kind']}; speed-ups {ratios}"
    return GoalRecord(name, crossing["context"], row, one["met"], bool(one["flagged"]))


def _space_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    beyond = max(point["beyond_m0_bytes"] for point in found["points"]) / (1 << 20)
    share = found["largest_unexplained_share"]
    return [
        GoalRecord(
            SHADOW_GROWTH,
            share,
            f"largest share of a step that is neither; {_GOALLESS}",
            None,
            None,
        ),
        GoalRecord(FLAT_MEMORY, beyond, f"MiB beyond M0 at most; {_GOALLESS}", None, None),
    ]


def _scorer_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    points = [
        GoalPoint(
            row["native_of_bandwidth"],
            f"{row['shape']} {row['key_mode']}, {row['bytes'] >> 20} MiB of shadows, median",
        )
        for row in found["rows"]
        if row["key_mode"] in _SCORER_MODES
    ]
    return [_verdict(SCORER, points, AtLeast(0.8))]


def _drive_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    points = []
    for name, case in found["cases"].items():
        engine = "uring" if "uring" in case else "threads"
        points.append(GoalPoint(case[engine]["ratio_to_reference"], f"{name}, {engine}, median"))
    return [_verdict(DRIVE, points, AtLeast(found["goal_ratio_to_reference"]))]


def _beta_goals(found: Mapping[str, Any]) -> list[GoalRecord]:
    row = f"beta_regret, {found['label']}, max_selected {found['max_selected']}"
    points = [GoalPoint(found["beta_regret"], row)]
    return [_verdict(BETA, points, AtMost(found["goal"]))]


def _verdict(goal: str, points: Sequence[GoalPoint], bound: GoalBound) -> GoalRecord:
    if not points:
        return unjudged(goal, points, bound, "the report has no row of it")
    return judged(goal, points, bound)


OTHER_GOALS = (
    OtherGoals("prefill.json", "make prefill", (FIRST_TOKEN,), _prefill_goals),
    OtherGoals("peers.json", "make peers", tuple(_PEERS.values()), _peers_goals),
    OtherGoals("space_lengths.json", "make space", (SHADOW_GROWTH, FLAT_MEMORY), _space_goals),
    OtherGoals("scorer.json", "make scorer", (SCORER,), _scorer_goals),
    OtherGoals("drive.json", "make drive", (DRIVE,), _drive_goals),
    OtherGoals("beta.json", "make beta", (BETA,), _beta_goals),
)


# Reports have kilobytes.
_MOST_BYTES = 1 << 26
Taken = TypeVar("Taken")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from, or why there is none.

    Parameters
    ----------
    value
        None where there is none.
    row
        Which line of which report it is, or the reason.
    """

    value: float | None
    row: str


class _NotMeasuredError(Exception):
    """A report is right, and does not have what is looked for; the message says why."""


# Cases of the drive's report: scattered rows, and the longest read that the product makes.
_ROWS_CASES, _LONGEST_CASE = "rows of ", "256 KiB"
_SCORER_SHAPE, _SCORER_MODE = "llama-3.1-8b", "int4"


def scorer_gbps(folder: Path) -> Figure:
    """Return how fast shadows are scored, from `make scorer`."""
    return _from(
        folder / "scorer.json", "make scorer", lambda found: _scorer_figure(found, "native")
    )


def machine_read_gbps(folder: Path) -> Figure:
    """Return how fast the same bytes are read by a plain loop, from `make scorer`."""
    return _from(folder / "scorer.json", "make scorer", lambda found: _scorer_figure(found, "read"))


def drive_gbps(folder: Path) -> Figure:
    """Return how fast the product reads the drive, from `make drive`."""
    return _from(folder / "drive.json", "make drive", lambda found: _drive_figure(found, "uring"))


def reference_gbps(folder: Path) -> Figure:
    """Return how fast the reference reads the same file, from `make drive`."""
    return _from(
        folder / "drive.json", "make drive", lambda found: _drive_figure(found, "reference")
    )


def fio_gbps(folder: Path) -> Figure:
    """Return how fast fio reads the same file, from `make drive` where fio is installed."""
    return _from(folder / "drive.json", "make drive", lambda found: _drive_figure(found, "fio"))


def beta_regret(folder: Path) -> Figure:
    """Return how much slower the chosen β is than the best measured one, as a share."""
    return _from(
        folder / "beta.json",
        "make beta",
        lambda found: (
            float(found["beta_regret"]),
            f"beta_regret, {found['label']}, max_selected {found['max_selected']}, "
            f"budget {found['dram_budget']}",
        ),
    )


def beta_sweep(folder: Path) -> dict[str, Any] | None:
    """Return what `make beta` measured over β, or None where its report is not there or other."""
    try:
        found = _read(folder / "beta.json")
        return {
            "label": f"{found['label']}; modelled beside it",
            "processor": str(found["processor"]),
            "threads": int(found["threads"]),
            "shape": str(found["shape"]),
            "layers": int(found["layers"]),
            "tokens": int(found["tokens"]),
            "alpha": float(found["alpha"]),
            "shadow": str(found["shadow"]),
            "chosen_host_segments": int(found["chosen_host_segments"]),
            "beta_regret": float(found["beta_regret"]),
            "rows": [
                {
                    "name": str(row["name"]),
                    "host_segments": int(row["host_segments"]),
                    "beta": None if row["beta"] is None else float(row["beta"]),
                    "seconds": float(row["seconds"]),
                    "median_seconds": float(row["median_seconds"]),
                    "modelled_seconds": {
                        str(kind): float(value) for kind, value in row["modelled_seconds"].items()
                    },
                }
                for row in found["rows"]
            ],
        }
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def other_goal_records(folder: Path) -> list[GoalRecord]:
    """Return the goals that other benchmarks are about, null with the reason where one is absent.

    A report's own `goals` are taken where it has them, else its figures are judged here.
    """
    records = []
    for report in OTHER_GOALS:
        taken = _taken(folder / report.file, report.command, report.records)
        if isinstance(taken, str):
            records += report.unknown(taken)
        else:
            found, written = taken
            records += [replace(one, row=f"{report.file}: {one.row}, {written}") for one in found]
    return records


def _from(file: Path, command: str, take: Callable[[dict[str, Any]], tuple[float, str]]) -> Figure:
    taken = _taken(file, command, take)
    if isinstance(taken, str):
        return Figure(None, taken)
    (value, row), written = taken
    return Figure(value, f"{file.name}: {row}, {written}")


def _taken(
    file: Path, command: str, take: Callable[[dict[str, Any]], Taken]
) -> tuple[Taken, str] | str:
    """Return what a report has and when it was written, or why there is nothing."""
    try:
        found = _read(file)
    except OSError:
        return f"{file.name} is not beside the report: run {command}"
    except (ValueError, RecursionError):
        return f"{file.name} is no JSON: run {command} again"
    try:
        taken = take(found)
    except _NotMeasuredError as error:
        return f"{file.name}: {error}"
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return f"{file.name} has another form: run {command} of this version"
    # Nothing says that it was this run's folder alone.
    written = time.strftime("%Y-%m-%d %H:%M", time.gmtime(file.stat().st_mtime))
    return taken, f"written {written} UTC"


def _read(file: Path) -> Any:
    return json.loads(read_plain(file, _MOST_BYTES).decode("utf-8"), parse_constant=_refuse)


def _refuse(constant: str) -> None:
    # The benchmark's own report could not be written with it.
    raise ValueError(f"{constant} is no JSON")


def _scorer_figure(found: dict[str, Any], name: str) -> tuple[float, str]:
    row = next(
        row
        for row in found["rows"]
        if (row["shape"], row["key_mode"]) == (_SCORER_SHAPE, _SCORER_MODE)
    )
    return row["bytes_per_second"][name]["median"] / 1e9, f"{_SCORER_SHAPE} {_SCORER_MODE}, median"


def _drive_figure(found: dict[str, Any], name: str) -> tuple[float, str]:
    cases = found["cases"]
    engine = "uring" if "uring" in cases[_LONGEST_CASE] else "threads"
    contender = engine if name == "uring" else name
    if name == "fio" and name not in cases[_LONGEST_CASE]:
        raise _NotMeasuredError("fio was not installed where make drive ran")
    # The sizes of row that the product is furthest behind the reference with.
    worst = min(
        (case for case in cases if case.startswith(_ROWS_CASES)),
        key=lambda case: float(cases[case][engine]["ratio_to_reference"]),
    )
    said = []
    for case in (worst, _LONGEST_CASE):
        pace = cases[case][contender]["median_mb_per_second"] / 1e3
        said.append(f"{case}: {pace:.3f} GB/s")
        if contender == engine:
            said[-1] += f", {cases[case][engine]['ratio_to_reference']:.2f} of the reference"
    return (
        cases[worst][contender]["median_mb_per_second"] / 1e3,
        f"{said[0]} (rows' worst ratio of {engine} to the reference; longest reads, {said[1]}), "
        f"{contender}, median",
    )
