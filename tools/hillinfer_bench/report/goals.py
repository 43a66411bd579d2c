# SPDX-License-Identifier: Apache-2.0
"""Goals of the decode benchmark: speed, nearness to the floor, and quality beside every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from hillinfer_bench.report.goal_record import (
    AtLeast,
    AtMost,
    GoalPoint,
    GoalRecord,
    MoreThan,
    judged,
    unjudged,
)
from hillinfer_bench.report.rows import BenchRow, Ratio
from hillinfer_bench.systems.case import REAL
from hillinfer_bench.systems.shapes import PAPER_SHAPES, SHAPES
from hillinfer_bench.systems.table import (
    ALONE,
    FLOOR,
    HILLINFER,
    IN_MEMORY,
    IN_MEMORY_TRUE,
    JOINED,
    REFERENCES,
    STOCK,
    selects,
)

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
        Either row is.
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
            speeds = _speed_points(own, lambda up: up.value)
            records.append(judged(goal.speed_name, speeds, least, absent))
        else:
            speeds = _speed_points(of_goal, lambda up: up.value)
            records.append(unjudged(goal.speed_name, speeds, least, goal.unknown))
        shares = _speed_points(of_goal, lambda up: up.share_of_allowed)
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


def _speed_points(ups: Sequence[SpeedUp], figure: Callable[[SpeedUp], float]) -> list[GoalPoint]:
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
        _quotient(rival.limit_ms, own.limit_ms),
        _quotient(rival.kv_limit_ms, own.kv_limit_ms),
        own.model,
        own.context,
        own.batch,
        own.alpha,
        own.budget_share,
        own.part,
        bool(own.flagged or rival.flagged),
    )


def _quotient(theirs: float | None, own: float | None) -> float:
    assert theirs is not None
    assert own is not None
    return theirs / own


OVER_FLOOR, AHEAD_OF_STOCK = "over_floor", "speedup_vs_transformers"
_FLOOR_BOUND, _FLOOR_ALPHA = AtMost(1.1), 0.1
_STOCK_BOUND, _STOCK_CONTEXT = MoreThan(1.0), 4096
# Beside the one that goals are about, which users get where all rows fit.
_TOLD = (IN_MEMORY_TRUE, HILLINFER)


def memory_ratios(rows: Sequence[BenchRow]) -> list[Ratio]:
    """Return every case's ratios to the loop's floor and to the faster stock cache."""
    found = []
    for row in rows:
        if row.system not in (IN_MEMORY, *_TOLD) or row.median_ms is None:
            continue
        own = [one for one in rows if one.case == row.case and one.median_ms]
        floors = [one for one in own if one.system == FLOOR]
        if floors:
            value = row.median_ms / _median(floors[0])
            found.append(_ratio(OVER_FLOOR, value, row, floors[0], floors))
        stock = [one for one in own if one.system in STOCK]
        if stock and row.system == IN_MEMORY:
            faster = min(stock, key=_median)
            value = _median(faster) / row.median_ms
            found.append(_ratio(AHEAD_OF_STOCK, value, row, faster, stock))
    return found


def memory_goal_records(rows: Sequence[BenchRow]) -> list[GoalRecord]:
    """Return both goals beside the worst case, then other systems' ratios to the floor.

    A row of the goal's cases that was skipped leaves the goal open, where the others reach it.
    """
    ratios = memory_ratios(rows)
    of_goal = [one for one in ratios if (one.name, one.alpha) == (OVER_FLOOR, _FLOOR_ALPHA)]
    own = _ratio_points([one for one in of_goal if one.system == IN_MEMORY])
    other = _ratio_points(
        [one for one in ratios if (one.name, one.system) == (OVER_FLOOR, IN_MEMORY)]
    )
    no_floor = f"no case has both {{}} and {FLOOR}"
    skipped = [
        row.name
        for row in rows
        if row.system == IN_MEMORY and row.alpha == _FLOOR_ALPHA and row.skipped is not None
    ]
    records = [
        judged(_floor_name(), own, _FLOOR_BOUND, skipped)
        if own
        else unjudged(_floor_name(), other, _FLOOR_BOUND, no_floor.format(IN_MEMORY))
    ]
    for system in _TOLD:
        points = _ratio_points([one for one in of_goal if one.system == system])
        name = _told_name(system)
        records.append(unjudged(name, points, _FLOOR_BOUND, no_floor.format(system)))
    return [*records, _stock_record(rows, [one for one in ratios if one.name == AHEAD_OF_STOCK])]


def memory_goal_names() -> list[str]:
    """Return the goals in words."""
    return [_floor_name(), *map(_told_name, _TOLD), _stock_name()]


def _stock_record(rows: Sequence[BenchRow], ratios: Sequence[Ratio]) -> GoalRecord:
    own = [one for one in ratios if one.context >= _STOCK_CONTEXT]
    if not own:
        reason = f"no case has both {IN_MEMORY} and {' or '.join(STOCK)}"
        return unjudged(_stock_name(), _ratio_points(ratios), _STOCK_BOUND, reason)
    known = {one.row for one in own}
    compared = {row.case for row in rows if row.system in STOCK}
    missing = [
        row.name
        for row in rows
        if row.system == IN_MEMORY
        and row.context >= _STOCK_CONTEXT
        and row.case in compared
        and row.name not in known
    ]
    return judged(_stock_name(), _ratio_points(own), _STOCK_BOUND, missing)


def _floor_name() -> str:
    return (
        f"{IN_MEMORY}: at most {_FLOOR_BOUND.limit:g} times the loop's floor at α "
        f"{_FLOOR_ALPHA:g}, every context"
    )


def _told_name(system: str) -> str:
    return f"{system}: times the loop's floor at α {_FLOOR_ALPHA:g} (told, not aimed at)"


def _stock_name() -> str:
    return (
        f"{IN_MEMORY}: ahead of transformers' own caches (more than {_STOCK_BOUND.limit:g} times "
        f"as fast) at every context from {_STOCK_CONTEXT} tokens"
    )


def _ratio_points(ratios: Sequence[Ratio]) -> list[GoalPoint]:
    return [GoalPoint(one.value, one.row, one.flagged) for one in ratios]


def _ratio(
    name: str, value: float, row: BenchRow, against: BenchRow, others: Sequence[BenchRow]
) -> Ratio:
    flagged = any(one.flagged for one in (row, *others))
    return Ratio(name, row.system, row.name, against.name, value, row.context, row.alpha, flagged)


def _median(row: BenchRow) -> float:
    assert row.median_ms is not None
    return row.median_ms


_AGREEMENT = "worst agreement with the full cache"
_PERPLEXITY = "largest perplexity over the full cache's"
_PRINTED = "quality beside every time"
_OWN = "HillInfer alone (told, not aimed at)"
# What is aimed at is that they are told; they have no limit of their own.
_AGREEMENTS, _PERPLEXITIES = AtLeast(0.0), AtMost(0.0)


def quality_goal_records(rows: Sequence[BenchRow]) -> list[GoalRecord]:
    """Return the worst quality of all systems that select, and HillInfer's.

    Missed where a row of a real model has a time and no perplexity or no agreement beside it. Rows
    of random weights have neither, and the record says how many there are.
    """
    timed = [
        row
        for row in rows
        if row.median_ms is not None and selects(row.system) and row.system not in (JOINED, ALONE)
    ]
    real = [row for row in timed if row.selection == REAL]
    own = [row for row in real if row.system.startswith(HILLINFER)]
    records = []
    for what, bound, points in (
        (_AGREEMENT, _AGREEMENTS, _agreements),
        (_PERPLEXITY, _PERPLEXITIES, _perplexities),
    ):
        unknown = "no row of a real model has it"
        record = unjudged(f"{_PRINTED}: {what}", points(real, rows), bound, unknown)
        records.append(_printed(record, real, len(timed) - len(real)))
        record = unjudged(f"{_OWN}: {what}", points(own, rows), bound, unknown)
        records.append(record)
    return records


def quality_goal_names() -> list[str]:
    """Return the goals in words."""
    return [f"{who}: {what}" for what in (_AGREEMENT, _PERPLEXITY) for who in (_PRINTED, _OWN)]


def _printed(record: GoalRecord, real: Sequence[BenchRow], random: int) -> GoalRecord:
    """Return the record with its verdict, and what has no quality."""
    lacking = [row.name for row in real if row.perplexity is None or row.agreement is None]
    row = record.row
    if lacking:
        row += f"; no quality beside the time of {len(lacking)} rows, first {lacking[0]}"
    if random:
        row += f"; {random} rows of random weights have none"
    met = not lacking if real else None
    # A spread of times says nothing about quality.
    return GoalRecord(record.goal, record.reached, row, met, None)


def _agreements(rows: Sequence[BenchRow], every: Sequence[BenchRow]) -> list[GoalPoint]:
    return [GoalPoint(row.agreement, row.name) for row in rows if row.agreement is not None]


def _perplexities(rows: Sequence[BenchRow], every: Sequence[BenchRow]) -> list[GoalPoint]:
    points = []
    for row in rows:
        full = {one.system: one.perplexity for one in every if one.case == row.case}
        reference = next((full[name] for name in REFERENCES if full.get(name)), None)
        if row.perplexity is not None and reference is not None:
            points.append(GoalPoint(row.perplexity / reference, row.name))
    return points


JOINED_SPEEDUP = "joined_speedup"
_JOINED_BOUND, _JOINED_CACHES, _JOINED_CONTEXT = AtLeast(3.0), 8, 4096
# Room for all rows with shadow and buffers; and what is told as a quarter.
_JOINED_BUDGETS = {"all rows in DRAM": (1.5, inf), "a quarter of the KV in DRAM": (0.25, 0.25)}


def joined_ratios(rows: Sequence[BenchRow]) -> list[Ratio]:
    """Return how many times as fast caches decode together as one after another, per case.

    What is allowed is what bytes and rates allow (modelled), or the model's loop alone where that
    was measured and is less.
    """
    found = []
    for row in rows:
        if row.system != JOINED or row.median_ms is None:
            continue
        alone = [one for one in rows if one.case == row.case and one.system == ALONE]
        for other in (one for one in alone if one.median_ms):
            value, flagged = _median(other) / row.median_ms, row.flagged or other.flagged
            allowed = _quotient(other.limit_ms, row.limit_ms)
            for floor in rows:
                if floor.case == row.case and floor.system == FLOOR and floor.median_ms:
                    of_loop = _median(other) / floor.median_ms
                    allowed = of_loop if allowed is None else min(allowed, of_loop)
            names = (JOINED_SPEEDUP, JOINED, row.name, other.name)
            found.append(Ratio(*names, value, row.context, row.alpha, flagged, allowed))
    return found


def joined_goal_records(rows: Sequence[BenchRow]) -> list[GoalRecord]:
    """Return what joined caches reached with all rows in DRAM and with a quarter of them."""
    ratios = {one.row: one for one in joined_ratios(rows)}
    measured = [row for row in rows if row.name in ratios]
    records = []
    for where, (least, most) in _JOINED_BUDGETS.items():
        of_budget = [row for row in measured if least <= row.budget_share <= most]
        own = [
            row
            for row in of_budget
            if (row.batch, row.context) == (_JOINED_CACHES, _JOINED_CONTEXT)
            and row.model not in SHAPES
        ]
        points = _ratio_points([ratios[row.name] for row in own or of_budget])
        unknown = f"no case has {JOINED} and {ALONE} with {where}"
        name = _joined_name(where)
        records.append(
            judged(name, points, _JOINED_BOUND)
            if own
            else unjudged(name, points, _JOINED_BOUND, unknown)
        )
    return records


def joined_goal_names() -> list[str]:
    """Return the goals in words."""
    return [_joined_name(where) for where in _JOINED_BUDGETS]


def _joined_name(where: str) -> str:
    return (
        f"{JOINED}: {_JOINED_CACHES} caches of {_JOINED_CONTEXT} tokens together at least "
        f"{_JOINED_BOUND.limit:g} times as fast as one after another, {where}"
    )
