# SPDX-License-Identifier: Apache-2.0
"""Goals that other commands measure, taken from their reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hillinfer_bench.frontier.goals import FrontierGoal
from hillinfer_bench.report.goal_record import AtMost, GoalPoint, GoalRecord, judged, unjudged

STUDY_FILE, SPACE_FILE = "study.json", "space-1m.json"
STUDY_COMMAND = "make study"
SPACE_COMMAND = (
    "python tools/space.py --shape 1b --layers 4 --tokens 1048576 --steps 16 --dram-budget 2GiB "
    f"--exact 0.02 --out build/reports/{SPACE_FILE}"
)
_RECALL = "needle and LongEval lines no worse than the full cache's own: NLL at most 0 above it"
_MILLION = "1M tokens of a 1B shape decode with M0 at 2 GiB: memory flat within 64 MiB"
# The study's name of the product's own settings.
_OWN_WAY = "HillInfer, as the product, "
_TOKENS, _BUDGET, _MEBIBYTE = 1 << 20, 2 << 30, 1 << 20


def goals_elsewhere(folder: Path, alpha: float) -> list[FrontierGoal]:
    """Return goals of reports in a folder, each not judged where its report is not there.

    Parameters
    ----------
    folder
        Where `hillinfer-bench study` and `tools/space.py` have written to.
    alpha
        Importance rate of the product's own settings.
    """
    return [
        FrontierGoal(_of(folder / STUDY_FILE, _RECALL, STUDY_COMMAND, lambda r: _recall(r, alpha))),
        FrontierGoal(_of(folder / SPACE_FILE, _MILLION, SPACE_COMMAND, _million)),
    ]


def _of(
    file: Path, goal: str, command: str, judge: Callable[[Mapping[str, Any]], GoalRecord]
) -> GoalRecord:
    try:
        return judge(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        reason = f"no such figures in {file.name}: {command}"
        return unjudged(goal, [], AtMost(0.0), reason)


def _recall(report: Mapping[str, Any], alpha: float) -> GoalRecord:
    """Judge the product's way by the mean of each length of each task; see `BesideFull`.

    Where a mean is above the full cache's by less than twice its error, nothing is judged.
    """
    bound, title = AtMost(0.0), f"{_OWN_WAY}α = {alpha:g} and "
    rows = [one for one in report["accuracy"]["beside_full"] if one["way"].startswith(title)]
    points = [
        GoalPoint(
            float(one["nll"]),
            f"{one['column']}: {one['nll']:+.3f} ± {one['error'] or 0.0:.3f} nats a digit, "
            f"{one['right']} right beside {one['full_right']} of {one['questions']}",
        )
        for one in rows
    ]
    if not points:
        raise ValueError("this way was not asked")
    is_worse = any(one["nll"] > 2 * (one["error"] or 0.0) for one in rows)
    is_above = any(one["nll"] > 0 for one in rows)
    if is_above and not is_worse:
        return unjudged(_RECALL, points, bound, "")
    return judged(_RECALL, points, bound)


def _million(report: Mapping[str, Any]) -> GoalRecord:
    """Judge what a context of a million tokens did to memory, and tell its time."""
    told = report["statistics"]
    growth = max(0, report["late_growth_bytes"]) / _MEBIBYTE
    beyond = (report["growth_bytes"] - told["dram_peak_bytes"]) / _MEBIBYTE
    row = (
        f"{report['tokens']} tokens in {report['shape']['layers']} layers, {report['shadow']}: "
        f"a step took {1e3 * report['seconds_per_step']:.0f} ms, M0's peak was "
        f"{told['dram_peak_bytes'] / _MEBIBYTE:.0f} of "
        f"{told['dram_budget_bytes'] / _MEBIBYTE:.0f} MiB, {beyond:.0f} beyond it"
    )
    asked = "1B" in report["label"] and report["tokens"] >= _TOKENS
    if not asked or told["dram_budget_bytes"] > _BUDGET:
        raise ValueError("another context or budget")
    bound = AtMost(report["slack_bytes"] / _MEBIBYTE)
    return judged(_MILLION, [GoalPoint(max(growth, beyond), row)], bound)
