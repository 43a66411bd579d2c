# SPDX-License-Identifier: Apache-2.0
"""Figures and goals of the other benchmarks, taken from their reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hillinfer.plain_file import read_plain
from hillinfer_bench.decode.goal_record import GoalRecord
from hillinfer_bench.decode.other_goals import OTHER_GOALS

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


# Cases of the drive's report: scattered rows, and the longest read that the product makes.
_ROWS_CASES, _LONGEST_CASE = "rows of ", "256 KiB"
_SCORER_SHAPE, _SCORER_MODE = "llama-3.1-8b", "int4"


def scorer_gbps(folder: Path) -> Figure:
    """Return how fast shadows are scored, from `make scorer`."""
    return _from(folder / "scorer.json", "make scorer", lambda found: _scorer(found, "native"))


def machine_read_gbps(folder: Path) -> Figure:
    """Return how fast the same bytes are read by a plain loop, from `make scorer`."""
    return _from(folder / "scorer.json", "make scorer", lambda found: _scorer(found, "read"))


def drive_gbps(folder: Path) -> Figure:
    """Return how fast the product reads the drive, from `make drive`."""
    return _from(folder / "drive.json", "make drive", lambda found: _drive(found, "uring"))


def fio_gbps(folder: Path) -> Figure:
    """Return how fast fio reads the same file, from `make drive`."""
    return _from(folder / "drive.json", "make drive", lambda found: _drive(found, "fio"))


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


def _scorer(found: dict[str, Any], name: str) -> tuple[float, str]:
    row = next(
        row
        for row in found["rows"]
        if (row["shape"], row["key_mode"]) == (_SCORER_SHAPE, _SCORER_MODE)
    )
    return row["bytes_per_second"][name]["median"] / 1e9, f"{_SCORER_SHAPE} {_SCORER_MODE}, median"


def _drive(found: dict[str, Any], name: str) -> tuple[float, str]:
    cases = found["cases"]
    engine = "uring" if "uring" in cases[_LONGEST_CASE] else "threads"
    contender = engine if name == "uring" else name
    # The sizes of row that the product is furthest behind fio with.
    worst = min(
        (case for case in cases if case.startswith(_ROWS_CASES)),
        key=lambda case: float(cases[case][engine]["ratio_to_fio"]),
    )
    said = []
    for case in (worst, _LONGEST_CASE):
        pace = cases[case][contender]["median_mb_per_second"] / 1e3
        said.append(f"{case}: {pace:.3f} GB/s")
        if contender == engine:
            said[-1] += f", {cases[case][engine]['ratio_to_fio']:.2f} of fio"
    return (
        cases[worst][contender]["median_mb_per_second"] / 1e3,
        f"{said[0]} (rows' worst ratio of {engine} to fio; longest reads, {said[1]}), "
        f"{contender}, median",
    )
