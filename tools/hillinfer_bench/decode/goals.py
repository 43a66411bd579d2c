# SPDX-License-Identifier: Apache-2.0
"""How many times faster than whom, beside what bytes and rates allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hillinfer.machine.model_shapes import PAPER_SHAPES
from hillinfer_bench.decode.goal_bound import AtLeast
from hillinfer_bench.decode.goal_point import GoalPoint
from hillinfer_bench.decode.goal_record import GoalRecord, judged, unjudged
from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.systems.table import HILLINFER, IN_MEMORY

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
    models
        Names of those it is about, each of which has to be measured; empty for any.
    budget_share, batch
        As in `Case`; None for any.
    context, alpha
        As in `Case`.
    """

    name: str
    system: str
    rivals: tuple[str, ...]
    least: float
    models: tuple[str, ...] = PAPER_SHAPES
    budget_share: float | None = 0.2
    batch: int | None = 1
    context: int = 32_768
    alpha: float = 0.1

    @property
    def about(self) -> str:
        """The cases it is about, in words."""
        return (
            f"{self.context} tokens, α {self.alpha:g}"
            + ("" if self.budget_share is None else f", budget {self.budget_share:.0%}")
            + ("" if self.batch is None else f", batch {self.batch}")
            + "".join(f", {model}" for model in self.models)
        )

    @property
    def speed_name(self) -> str:
        """The aimed speed-up in words."""
        return f"{self.name} of {self.least:g} or more at {self.about}"

    @property
    def share_name(self) -> str:
        """The aimed share of what is allowed in words."""
        return f"{self.name}: {SHARE_OF_ALLOWED:.0%} of what bytes and rates allow in every row"

    @property
    def unknown(self) -> str:
        """Why nothing is known of it, where nothing is."""
        return f"no case has both {self.system} and {' or '.join(self.rivals)}"

    def is_about(self, up: SpeedUp) -> bool:
        """Return whether a speed-up was measured on one of its cases; parts of a plan are none."""
        return (
            not up.part
            and (up.context, up.alpha) == (self.context, self.alpha)
            and self.budget_share in (None, up.budget_share)
            and self.batch in (None, up.batch)
            and (not self.models or up.model in self.models)
        )


GOALS = (
    Goal("speedup_vs_full_drive", HILLINFER, ("full-drive",), 8.56),
    Goal("speedup_vs_h2o", HILLINFER, ("h2o-all-keys",), 8.56),
    Goal("speedup_vs_infinigen", HILLINFER, ("infinigen",), 4.21),
    Goal("speedup_vs_leoam", HILLINFER, ("leoam",), 4.21),
    Goal("speedup_vs_full_memory", IN_MEMORY, ("full-memory",), 2.0, (), None, None),
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
    model, context, batch, alpha, budget_share, part
        Of the case.
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
    model: str
    context: int
    batch: int
    alpha: float
    budget_share: float
    part: str
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


def goal_records(ups: Sequence[SpeedUp]) -> list[GoalRecord]:
    """Return each goal beside what its worst case reached.

    Speed-ups are judged on the goal's cases alone; where none of them is there, the worst of any
    case is told and not judged. The share of what is allowed is that of every row.
    """
    records = []
    for goal in GOALS:
        of_goal = [up for up in ups if up.name == goal.name]
        own = [up for up in of_goal if goal.is_about(up)]
        least, share = AtLeast(goal.least), AtLeast(SHARE_OF_ALLOWED)
        if own:
            absent = [name for name in goal.models if name not in {up.model for up in own}]
            speeds = _points(own, lambda up: up.value)
            records.append(judged(goal.speed_name, speeds, least, absent))
        else:
            speeds = _points(of_goal, lambda up: up.value)
            records.append(unjudged(goal.speed_name, speeds, least, goal.unknown))
        shares = _points(of_goal, lambda up: up.share_of_allowed)
        if shares:
            # Rows of other cases can miss it, but not meet it without the goal's own.
            absent = [] if own else [goal.about]
            records.append(judged(goal.share_name, shares, share, absent))
        else:
            records.append(unjudged(goal.share_name, shares, share, goal.unknown))
    return records


def goal_names() -> list[str]:
    """Return the goals in words."""
    return [name for goal in GOALS for name in (goal.speed_name, goal.share_name)]


def _points(ups: Sequence[SpeedUp], figure: Callable[[SpeedUp], float]) -> list[GoalPoint]:
    return [GoalPoint(figure(up), up.row, up.flagged) for up in ups]


def _about(goal: Goal, ups: Sequence[SpeedUp]) -> list[SpeedUp]:
    own = [up for up in ups if up.name == goal.name]
    return [up for up in own if goal.is_about(up)] or own


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
        own.model,
        own.context,
        own.batch,
        own.alpha,
        own.budget_share,
        own.part,
        bool(own.flagged or rival.flagged),
    )


def _ratio(theirs: float | None, own: float | None) -> float:
    assert theirs is not None
    assert own is not None
    return theirs / own
