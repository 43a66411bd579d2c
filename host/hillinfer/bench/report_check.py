# SPDX-License-Identifier: Apache-2.0
"""Whether a report says what readers rely on."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from hillinfer.bench.case import MODELLED, REAL
from hillinfer.bench.timing import LARGEST_SPREAD

SCALARS = (
    "speedup_vs_full_drive",
    "speedup_vs_h2o",
    "speedup_vs_infinigen",
    "speedup_vs_leoam",
    "speedup_vs_full_memory",
    "scorer_gbps",
    "machine_read_gbps",
    "drive_gbps",
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
    "skipped": (str, NoneType),
}
_MEASURED = (
    "min_ms",
    "median_ms",
    "spread",
    "tokens_per_second",
    "drive_read_bytes",
    "dram_read_bytes",
    "held_bytes",
    "budget_bytes",
    "rss_bytes",
    "limit_ms",
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
    goals = report.get("goals")
    if not goals:
        faults.append("goals are missing")
    for goal in goals or ():
        known = {"goal", "reached", "met", "flagged"} <= set(goal)
        if not known or goal["met"] not in (True, False, None):
            faults.append(f"goal {goal!r} lacks goal, reached, met or flagged")
        elif goal["met"] and goal["flagged"]:
            faults.append(f"goal {goal['goal']!r} is met by flagged rows")
    rows = report.get("rows")
    if not rows:
        faults.append("rows are missing")
    for row in rows or ():
        faults += [f"row {row.get('name')!r}: {fault}" for fault in _row_faults(row)]
    names = [row.get("name") for row in rows or ()]
    if len(set(names)) != len(names):
        faults.append("two rows have one name")
    return faults


def _row_faults(row: Mapping[str, Any]) -> list[str]:
    faults = [
        f"{name} is {row.get(name)!r}"
        for name, types in _ROW_TYPES.items()
        if not isinstance(row.get(name), types)
    ]
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
    if not 0 < row["min_ms"] <= row["median_ms"]:
        faults.append(f"min_ms {row['min_ms']} and median_ms {row['median_ms']} do not go together")
    if row.get("flagged") is not (row["spread"] > LARGEST_SPREAD):
        faults.append(f"flagged is {row.get('flagged')!r} with a spread of {row['spread']}")
    return faults
