# SPDX-License-Identifier: Apache-2.0
"""How many times faster than whom, beside what bytes and rates allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hillinfer.bench.row import BenchRow
from hillinfer.bench.systems.table import HILLINFER, IN_MEMORY

SHARE_OF_ALLOWED = 0.8


@dataclass(frozen=True)
class Goal:
    """A speed-up that is aimed at.

    Parameters
    ----------
    name
        As the report has it.
    system, rivals
        Who is compared with whom; the first rival of these that was measured.
    least
        Speed-up aimed at.
    context
        Tokens of the cases it is about.
    """

    name: str
    system: str
    rivals: tuple[str, ...]
    least: float
    context: int = 32_768


GOALS = (
    Goal("speedup_vs_full_drive", HILLINFER, ("full-drive",), 8.56),
    Goal("speedup_vs_h2o", HILLINFER, ("h2o-all-keys",), 8.56),
    Goal("speedup_vs_infinigen", HILLINFER, ("infinigen",), 4.21),
    Goal("speedup_vs_leoam", HILLINFER, ("leoam",), 4.21),
    Goal("speedup_vs_full_memory", IN_MEMORY, ("full-memory",), 2.0),
)


@dataclass(frozen=True)
class SpeedUp:
    """One system against another on one case.

    Parameters
    ----------
    name
        Of the goal.
    row, against
        Names of both rows.
    value, kv_value
        Ratio of the medians, and of what holding and attending to the context costs alone; the
        second is None where the floor was not measured.
    allowed, kv_allowed
        Ratios that bytes and rates allow; modelled.
    context
        Tokens of the case.
    flagged
        The spread of either row is above 20 %.
    """

    name: str
    row: str
    against: str
    value: float
    kv_value: float | None
    allowed: float
    kv_allowed: float
    context: int
    flagged: bool

    @property
    def share_of_allowed(self) -> float:
        """The measured ratio over the allowed one."""
        return self.value / self.allowed


def speed_ups(rows: Sequence[BenchRow]) -> list[SpeedUp]:
    """Return every pair of rows that a goal is about, on every case."""
    found = []
    for goal in GOALS:
        for own in rows:
            if own.system != goal.system or own.median_ms is None:
                continue
            rivals = {row.system: row for row in rows if row.case == own.case and row.median_ms}
            rival = next((rivals[name] for name in goal.rivals if name in rivals), None)
            if rival is not None:
                found.append(_speed_up(goal.name, own, rival))
    return found


def reached(goal: Goal, ups: Sequence[SpeedUp]) -> SpeedUp | None:
    """Return the smallest speed-up on the goal's cases, or on any case where none is there."""
    return min(_about(goal, ups), key=lambda up: up.value, default=None)


def goal_records(ups: Sequence[SpeedUp]) -> list[dict[str, object]]:
    """Return each goal beside what its worst case reached, for the report.

    A goal is not met by a measurement that is `flagged` in any of its cases, whatever it reached.
    """
    records = []
    for goal in GOALS:
        own = _about(goal, ups)
        name = f"{goal.name} of {goal.least:g} or more at {goal.context} tokens"
        records.append(_record(name, goal, own, lambda up: up.value, goal.least))
        name = f"{goal.name}: {SHARE_OF_ALLOWED:.0%} of what bytes and rates allow"
        records.append(_record(name, goal, own, lambda up: up.share_of_allowed, SHARE_OF_ALLOWED))
    return records


def _about(goal: Goal, ups: Sequence[SpeedUp]) -> list[SpeedUp]:
    own = [up for up in ups if up.name == goal.name]
    return [up for up in own if up.context == goal.context] or own


def _record(
    name: str,
    goal: Goal,
    ups: Sequence[SpeedUp],
    figure: Callable[[SpeedUp], float],
    least: float,
) -> dict[str, object]:
    worst = min(ups, key=figure, default=None)
    if worst is None:
        return {"goal": name, "reached": None, "row": None, "met": None, "flagged": None}
    flagged = any(up.flagged for up in ups)
    met = figure(worst) >= least and not flagged
    return {
        "goal": name,
        "reached": round(figure(worst), 3),
        "row": worst.row,
        "met": met if worst.context == goal.context else None,
        "flagged": flagged,
    }


def _speed_up(name: str, own: BenchRow, rival: BenchRow) -> SpeedUp:
    assert own.median_ms is not None
    assert rival.median_ms is not None
    kv = None
    # Below nothing lies noise.
    if own.kv_ms is not None and rival.kv_ms is not None and min(own.kv_ms, rival.kv_ms) > 0:
        kv = rival.kv_ms / own.kv_ms
    return SpeedUp(
        name,
        own.name,
        rival.name,
        rival.median_ms / own.median_ms,
        kv,
        _ratio(rival.limit_ms, own.limit_ms),
        _ratio(rival.kv_limit_ms, own.kv_limit_ms),
        own.context,
        bool(own.flagged or rival.flagged),
    )


def _ratio(theirs: float | None, own: float | None) -> float:
    assert theirs is not None
    assert own is not None
    return theirs / own
