# SPDX-License-Identifier: Apache-2.0
"""Checks that a report has what readers rely on."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from hillinfer_bench.report.goal_record import GoalRecord
from hillinfer_bench.report.goals import (
    goal_names,
    joined_goal_names,
    memory_goal_names,
    quality_goal_names,
)
from hillinfer_bench.report.other_reports import OTHER_GOALS
from hillinfer_bench.report.rows import row_flags
from hillinfer_bench.rivals.h2o import HELD_PROMPT
from hillinfer_bench.rivals.table import RIVALS
from hillinfer_bench.systems.case import MODELLED, REAL
from hillinfer_bench.systems.table import ALONE, HILLINFER, JOINED, make_system, system_names

SCALARS = (
    "speedup_vs_full_drive",
    "speedup_vs_h2o",
    "speedup_vs_infinigen",
    "speedup_vs_leoam",
    "speedup_vs_full_memory",
    "scorer_gbps",
    "machine_read_gbps",
    "drive_gbps",
    "reference_gbps",
    "fio_gbps",
    "beta_regret",
)
_NUMBER = (int, float)
_ROW_TYPES: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "model": (str,),
    "type": (str,),
    "layers": (int,),
    "all_layers": (int,),
    "context": (int,),
    "batch": (int,),
    "alpha": _NUMBER,
    "budget_share": _NUMBER,
    "shadow": (str,),
    "system": (str,),
    "selection": (str,),
    "shadow_used": (str, NoneType),
    "skipped": (str, NoneType),
}
_FIGURES: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "speed_ups": {
        "name": (str,),
        "row": (str,),
        "against": (str,),
        "value": _NUMBER,
        "kv_value": (*_NUMBER, NoneType),
        "allowed": _NUMBER,
        "share_of_allowed": _NUMBER,
        "flagged": (bool,),
    },
    "ratios": {
        "name": (str,),
        "system": (str,),
        "row": (str,),
        "against": (str,),
        "value": _NUMBER,
        "allowed": (*_NUMBER, NoneType),
        "flagged": (bool,),
    },
}
_BETA_TYPES: Mapping[str, tuple[type, ...]] = {
    "label": (str,),
    "processor": (str,),
    "threads": (int,),
    "shape": (str,),
    "layers": (int,),
    "tokens": (int,),
    "alpha": _NUMBER,
    "shadow": (str,),
    "chosen_host_segments": (int,),
    "beta_regret": _NUMBER,
    "rows": (list,),
}
_BETA_ROW_TYPES: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "host_segments": (int,),
    "beta": (*_NUMBER, NoneType),
    "seconds": _NUMBER,
    "median_seconds": _NUMBER,
    "modelled_seconds": (dict,),
}
_MEASURED = (
    "min_ms",
    "median_ms",
    "spread",
    "tokens_per_second",
    "drive_reads",
    "drive_read_bytes",
    "dram_read_bytes",
    "held_bytes",
    "budget_bytes",
    "rss_bytes",
    "memory_gbps",
    "drive_gbps",
    "read_us",
    "limit_ms",
    "serial_limit_ms",
    "middle_limit_ms",
    "kv_limit_ms",
)


def report_faults(report: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a report, a line each; empty where nothing is."""
    faults = []
    for name in SCALARS:
        value = report.get(name, "missing")
        if not isinstance(value, (*_NUMBER, NoneType)):
            faults.append(f"{name} is {value!r}, not a number or null")
        told = report.get("scalars", {}).get(name, {})
        if told.get("value") != value or not told.get("row"):
            faults.append(f"{name} names no row or reason")
    faults += _goal_faults(report.get("goals"))
    for name, figures in _FIGURES.items():
        own = report.get(name)
        if not isinstance(own, list):
            faults.append(f"{name} are missing")
            continue
        faults += [f"{name}: {fault}" for one in own for fault in _type_faults(one, figures)]
    rows = report.get("rows")
    if not rows:
        faults.append("rows are missing")
    for row in rows or ():
        faults += [f"row {row.get('name')!r}: {fault}" for fault in _row_faults(row)]
    names = [row.get("name") for row in rows or ()]
    if len(set(names)) != len(names):
        faults.append("two rows have one name")
    if "beta" not in report:
        faults.append("beta is missing; null says that it was not measured")
    elif report["beta"] is not None:
        faults += [f"beta: {fault}" for fault in _beta_faults(report)]
    return faults


def _goal_faults(goals: Any) -> list[str]:
    if not isinstance(goals, list) or not goals:
        return ["goals are missing"]
    faults, told = [], []
    for goal in goals:
        try:
            told.append(GoalRecord(**goal))
        except (TypeError, ValueError) as error:
            faults.append(f"goal {goal!r}: {error}")
    names = {one.goal for one in told}
    stated = (
        *goal_names(),
        *memory_goal_names(),
        *joined_goal_names(),
        *quality_goal_names(),
    )
    faults += [f"goal {name!r} is missing" for name in stated if name not in names]
    # What they are called is theirs.
    faults += [
        f"goals of {other.file} are missing"
        for other in OTHER_GOALS
        if not any(one.row.startswith(other.file) for one in told)
    ]
    return faults


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    faults = _type_faults(row, _ROW_TYPES)
    if row.get("selection") not in (REAL, MODELLED):
        faults.append(f"selection is {row.get('selection')!r}")
    if row.get("skipped") is not None:
        return faults
    faults += [
        f"{name} is {row.get(name)!r}"
        for name in _MEASURED
        if not isinstance(row.get(name), _NUMBER)
    ]
    if faults:
        return faults
    faults += _step_faults(row)
    if not 0 < row["min_ms"] <= row["median_ms"]:
        faults.append(f"min_ms {row['min_ms']} and median_ms {row['median_ms']} do not go together")
    faults += [
        f"limit_ms {row['limit_ms']} lies above {name} {row[name]}"
        for name in ("serial_limit_ms", "middle_limit_ms")
        if row["limit_ms"] > row[name]
    ]
    flags = list(row_flags(row["spread"], row["min_ms"], row["limit_ms"]))
    if row.get("flags") != flags or row.get("flagged") is not bool(flags):
        faults.append(
            f"flagged is {row.get('flagged')!r} for {row.get('flags')!r}, and its figures say "
            f"{flags!r}"
        )
    return faults + _shadow_faults(row) + _budget_faults(row)


def _shadow_faults(row: Mapping[str, Any]) -> list[str]:
    asked, used = row.get("shadow"), row.get("shadow_used")
    own = row["system"].startswith(HILLINFER)
    if own != (used is not None) or (own and asked not in ("auto", used)):
        return [f"shadow_used is {used!r} of {row['system']}, shadow {asked!r}"]
    return []


def _step_faults(row: Mapping[str, Any]) -> list[str]:
    steps = row.get("step_ms")
    # A tuple before it is written.
    if not isinstance(steps, list | tuple) or not all(isinstance(one, _NUMBER) for one in steps):
        return [f"step_ms is {steps!r}"]
    if len(steps) != row.get("steps"):
        return [f"step_ms has {len(steps)} steps, and steps is {row.get('steps')!r}"]
    return []


def _budget_faults(row: Mapping[str, Any]) -> list[str]:
    system, chosen = row["system"], row.get("chosen")
    joined = system in (JOINED, ALONE)
    if system not in system_names() and not joined:
        return [f"system {system!r} is not known"]
    if not (joined or make_system(system).bounded) or row["held_bytes"] <= row["budget_bytes"]:
        return []
    beyond = f"held_bytes {row['held_bytes']} exceed budget_bytes {row['budget_bytes']}"
    if system not in RIVALS or not RIVALS[system].holds_prompt:
        return [beyond]
    # Before a prompt was observed nothing of it can be dropped.
    return [] if HELD_PROMPT in str(chosen) else [f"{beyond}, and chosen {chosen!r} says not why"]


def _beta_faults(report: Mapping[str, Any]) -> list[str]:
    sweep = report["beta"]
    if not isinstance(sweep, Mapping):
        return [f"it is {sweep!r}, not an object or null"]
    faults = _type_faults(sweep, _BETA_TYPES)
    if faults:
        return faults
    if sweep["beta_regret"] != report.get("beta_regret"):
        faults.append(f"beta_regret is {sweep['beta_regret']} here, but not in the scalars")
    if "modelled" not in sweep["label"]:
        faults.append(f"label {sweep['label']!r} does not say what is modelled")
    for number, row in enumerate(sweep["rows"]):
        if not isinstance(row, Mapping):
            faults.append(f"row {number} is {row!r}")
            continue
        own = _type_faults(row, _BETA_ROW_TYPES)
        if not own:
            if not 0 < row["seconds"] <= row["median_seconds"]:
                own.append(
                    f"seconds {row['seconds']} and median_seconds {row['median_seconds']} "
                    "do not go together"
                )
            own += [
                f"modelled_seconds of {kind!r} are {value!r}"
                for kind, value in row["modelled_seconds"].items()
                if not isinstance(value, _NUMBER)
            ]
        faults += [f"row {number}: {fault}" for fault in own]
    if not any(
        isinstance(row, Mapping)
        and (row.get("name"), row.get("host_segments")) == ("auto", sweep["chosen_host_segments"])
        for row in sweep["rows"]
    ):
        faults.append(f"no row auto has the {sweep['chosen_host_segments']} chosen host segments")
    return faults


def _type_faults(found: Mapping[str, Any], expected: Mapping[str, tuple[type, ...]]) -> list[str]:
    return [
        f"{name} is {found.get(name)!r}"
        for name, types in expected.items()
        if not isinstance(found.get(name), types)
    ]
