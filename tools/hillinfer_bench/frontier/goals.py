# SPDX-License-Identifier: Apache-2.0
"""Goals of the comparison, beside what was reached and what bytes and rates allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hillinfer_bench.frontier.equal import TimeRatio, default_row
from hillinfer_bench.frontier.modelled import Machine
from hillinfer_bench.frontier.sweep import SweptRow
from hillinfer_bench.frontier.swept import CODED, HILLINFER
from hillinfer_bench.frontier.times import (
    ALL_CODED,
    FOUR_BIT_IN_MEMORY,
    IN_MEMORY,
    TODAY,
    TODAY_ALPHA,
    Allowed,
    TimedRow,
    first_rows,
)
from hillinfer_bench.report.goal_record import (
    AtLeast,
    AtMost,
    GoalBound,
    GoalPoint,
    GoalRecord,
    MoreThan,
    judged,
    unjudged,
)
from hillinfer_bench.report.rows import BenchRow

_KL, _BYTES, _SPEED = AtMost(0.35), AtMost(0.25), AtLeast(2.0)
_LEAST = {
    "full-drive": 8.56,
    "h2o-all-keys": 8.56,
    "infinigen": 4.21,
    "leoam": 4.21,
    "quest": 4.21,
}
# Of what bytes and rates allow, where they forbid a goal.
_ENOUGH = 0.8


@dataclass(frozen=True)
class FrontierGoal:
    """A goal, and what bytes and rates allow of it.

    Parameters
    ----------
    record
        The goal beside what was reached.
    allowed
        The most that bytes and rates allow, modelled; None where that is not known.
    share
        What was reached of that; None likewise.
    forbidden
        Whether what is allowed does not reach the goal.
    with_loop
        Of a speed, what is left where both also take what the model's loop takes alone in the same
        turns. It judges nothing.
    share_with_loop
        What was reached of that; None likewise.
    by_middle
        Of a speed, what the middle rates between the turns allow. It judges nothing either.
    share_by_middle
        What was reached of that; None where it is not known.
    """

    record: GoalRecord
    allowed: float | None = None
    share: float | None = None
    forbidden: bool = False
    with_loop: float | None = None
    share_with_loop: float | None = None
    by_middle: float | None = None
    share_by_middle: float | None = None

    @classmethod
    def of(
        cls, record: GoalRecord, bound: GoalBound, reached: float, allowed: float
    ) -> FrontierGoal:
        """Return a goal beside its limit.

        Parameters
        ----------
        record
            The goal.
        bound
            What it asks for.
        reached, allowed
            What was reached, and the limit.
        """
        share = allowed / reached if isinstance(bound, AtMost) else reached / allowed
        return cls(record, allowed, share, not bound.reached(allowed))

    @classmethod
    def of_speed(
        cls, record: GoalRecord, bound: GoalBound, reached: float, allowed: Allowed | None
    ) -> FrontierGoal:
        """Return a goal of a speed beside its limits, where these are known; see `of`."""
        if allowed is None:
            return cls(record)
        made = cls.of(record, bound, reached, allowed.by_rates)
        left, middle = allowed.with_loop, allowed.by_middle
        if middle is not None:
            made = replace(made, by_middle=middle, share_by_middle=reached / middle)
        if bound.reached(left):
            return replace(made, with_loop=left)
        return replace(made, with_loop=left, share_with_loop=reached / left)

    @property
    def verdict(self) -> str:
        """In words: what is forbidden counts as reached from four fifths of the limit on."""
        if self.record.met:
            return "met"
        if self.record.met is None:
            return "not judged"
        within = self.forbidden and not self.record.flagged and (self.share or 0.0) >= _ENOUGH
        return "limit reached" if within else "missed"

    def as_record(self) -> dict[str, Any]:
        """Return what the report says of it."""
        known = {
            "allowed": self.allowed,
            "allowed_with_loop": self.with_loop,
            "allowed_by_middle": self.by_middle,
            "share_of_allowed": self.share,
            "share_with_loop": self.share_with_loop,
            "share_by_middle": self.share_by_middle,
        }
        return {
            **asdict(self.record),
            **{name: None if one is None else round(one, 3) for name, one in known.items()},
            "forbidden": self.forbidden,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Figures:
    """What the top of the report has, each None where it was not measured.

    Parameters
    ----------
    kl_share
        KL of the default over that of α 0.1 with all selected tokens exact.
    drive_bytes_share, decode_speedup
        Drive bytes of a step of the default over today's, and today's time over the default's, on
        the real model.
    ahead_of_full_drive
        The full cache's time on the drive over the default's, on the real model.
    """

    kl_share: float | None
    drive_bytes_share: float | None
    decode_speedup: float | None
    ahead_of_full_drive: float | None


def figures(swept: Sequence[SweptRow], real: Sequence[TimedRow]) -> Figures:
    """Return the figures of a sweep and of the real model's timed rows."""
    own = default_row(swept)
    today = today_row(swept)
    rows = first_rows(real)
    return Figures(
        own.kl / today.kl if own is not None and today is not None and today.kl else None,
        _quotient(rows, CODED, TODAY, "drive_read_bytes"),
        _quotient(rows, TODAY, CODED, "median_ms"),
        _quotient(rows, "full-drive", CODED, "median_ms"),
    )


def _quotient(rows: dict[str, BenchRow], over: str, under: str, field: str) -> float | None:
    values = [getattr(rows.get(name), field, None) for name in (over, under)]
    if values[0] is None or not values[1]:
        return None
    return float(values[0] / values[1])


def frontier_goals(
    swept: Sequence[SweptRow],
    real: Sequence[TimedRow],
    shapes: Sequence[Sequence[TimedRow]],
    ratios: Sequence[TimeRatio],
    machines: Sequence[Machine],
) -> list[FrontierGoal]:
    """Return every goal.

    Parameters
    ----------
    swept
        The sweep.
    real, shapes
        Timed rows of the real model, and of each shape.
    ratios
        Of all shapes.
    machines
        What the timed models were modelled with.
    """
    found, rows = figures(swept, real), first_rows(real)
    made = [
        _goal("KL of the default over that of α 0.1, all exact", found.kl_share, _KL),
        _bytes_goal(swept, rows, found.drive_bytes_share, machines),
        _speed_goal(
            "decode speed over today's, a quarter of the KV in DRAM",
            found.decode_speedup,
            real,
            TODAY,
        ),
        _speed_goal(
            "ahead of the full cache on the drive, a quarter of the KV in DRAM",
            found.ahead_of_full_drive,
            real,
            "full-drive",
        ),
    ]
    made += [_rival_goal(name, least, ratios) for name, least in _LEAST.items()]
    return [*made, _memory_goal(shapes), _four_bit_goal(shapes)]


def _bytes_goal(
    swept: Sequence[SweptRow],
    rows: dict[str, BenchRow],
    reached: float | None,
    machines: Sequence[Machine],
) -> FrontierGoal:
    """Return the goal of drive bytes; allowed is what both read where pools hit by chance."""
    name = "drive bytes of a step over today's, a quarter of the KV in DRAM"
    made = _goal(name, reached, _BYTES, *_both(rows, TODAY, CODED))
    own, today, coded = default_row(swept), today_row(swept), rows.get(CODED)
    machine = next(
        (one for one in machines if coded is not None and one.model == coded.model), None
    )
    if reached is None or own is None or today is None or machine is None:
        return made
    ours, theirs = (machine.drive_bytes(one.setting.system, one.share) for one in (own, today))
    return FrontierGoal.of(made.record, _BYTES, reached, ours / theirs) if theirs else made


def today_row(swept: Sequence[SweptRow]) -> SweptRow | None:
    """Return the row of α 0.1 with all exact; None where it was not swept."""
    return next(
        (
            row
            for row in swept
            if row.setting.system.name == HILLINFER and row.setting.value == TODAY_ALPHA
        ),
        None,
    )


def _both(rows: dict[str, BenchRow], *names: str) -> tuple[BenchRow | None, ...]:
    return tuple(rows.get(name) for name in names)


def _goal(
    name: str, reached: float | None, bound: GoalBound, *rows: BenchRow | None
) -> FrontierGoal:
    words = f"{name}: {_sign(bound)} {bound.limit:g}"
    known = [row for row in rows if row is not None]
    if reached is None:
        reasons = [f"{row.system}: {row.skipped}" for row in known if row.skipped]
        return FrontierGoal(unjudged(words, [], bound, "; ".join(reasons) or "not measured"))
    flagged = any(row.flagged for row in known)
    where = ", ".join(row.name for row in known) or "the sweep"
    return FrontierGoal(judged(words, [GoalPoint(reached, where, flagged)], bound))


def _speed_goal(
    name: str, reached: float | None, real: Sequence[TimedRow], slower: str
) -> FrontierGoal:
    """Return a goal of the default's speed over another system's, on the real model."""
    other, own = _both(first_rows(real), slower, CODED)
    made = _goal(name, reached, _SPEED, other, own)
    if reached is None or other is None or own is None:
        return made
    return FrontierGoal.of_speed(made.record, _SPEED, reached, Allowed.of(real, other, own))


def _sign(bound: GoalBound) -> str:
    if isinstance(bound, MoreThan):
        return "more than"
    return "at least" if isinstance(bound, AtLeast) else "at most"


def _rival_goal(name: str, least: float, ratios: Sequence[TimeRatio]) -> FrontierGoal:
    bound = AtLeast(least)
    words = f"speed over {name} at equal quality, the paper's shapes: at least {least:g}"
    own = [one for one in ratios if one.rival == name]
    timed = [one for one in own if one.value is not None]
    if not timed:
        reason = "; ".join(dict.fromkeys(one.source for one in own)) or "no times were taken"
        return FrontierGoal(unjudged(words, [], bound, reason))
    points = [GoalPoint(one.value or 0.0, one.source, one.flagged) for one in timed]
    modelled = [one.source for one in timed if one.source.startswith("modelled, ")]
    record = unjudged(words, points, bound, "") if modelled else judged(words, points, bound)
    worst = min(timed, key=lambda one: one.value or 0.0)
    if worst.allowed is None or worst.allowed_with_loop is None:
        return FrontierGoal(record)
    limits = Allowed(worst.allowed, worst.allowed_with_loop, worst.allowed_by_middle)
    return FrontierGoal.of_speed(record, bound, worst.value or 0.0, limits)


def _memory_goal(shapes: Sequence[Sequence[TimedRow]]) -> FrontierGoal:
    words = "speed over the fastest 16-bit full cache, all in DRAM: at least 2"
    points, allowed, reasons = [], [], []
    for shape in shapes:
        rows = first_rows(shape)
        own, full = rows.get(IN_MEMORY), rows.get("full-memory")
        reached = _quotient(rows, "full-memory", IN_MEMORY, "median_ms")
        if own is None or full is None or reached is None:
            reasons += [
                f"{row.system}: {row.skipped}" for row in (own, full) if row and row.skipped
            ]
            continue
        points.append(GoalPoint(reached, own.name, own.flagged or full.flagged))
        allowed.append(Allowed.of(shape, full, own))
    if not points:
        reason = "; ".join(dict.fromkeys(reasons)) or "no times were taken"
        return FrontierGoal(unjudged(words, [], _SPEED, reason))
    worst = min(range(len(points)), key=lambda i: points[i].value)
    record = judged(words, points, _SPEED, reasons)
    return FrontierGoal.of_speed(record, _SPEED, points[worst].value, allowed[worst])


def _four_bit_goal(shapes: Sequence[Sequence[TimedRow]]) -> FrontierGoal:
    """Return the goal beside the faster of the full caches whose tokens are codes of 4 bits."""
    bound = MoreThan(1.0)
    words = "speed over a 4-bit full cache at its own quality, all in DRAM: more than 1"
    points, allowed, reasons = [], [], []
    for shape in shapes:
        rows = first_rows(shape)
        own, others = rows.get(IN_MEMORY), _both(rows, FOUR_BIT_IN_MEMORY, ALL_CODED)
        timed = [one for one in others if one is not None and one.median_ms is not None]
        if own is None or own.median_ms is None or not timed:
            left = (own, *others)
            reasons += [f"{row.system}: {row.skipped}" for row in left if row and row.skipped]
            continue
        four = min(timed, key=lambda one: one.median_ms or 0.0)
        reached = (four.median_ms or 0.0) / own.median_ms
        flagged = own.flagged or four.flagged
        points.append(GoalPoint(reached, f"{own.name}, over {four.system}", flagged))
        allowed.append(Allowed.of(shape, four, own))
    if not points:
        reason = "; ".join(dict.fromkeys(reasons)) or "no times were taken"
        return FrontierGoal(unjudged(words, [], bound, reason))
    worst = min(range(len(points)), key=lambda i: points[i].value)
    record = judged(words, points, bound, reasons)
    return FrontierGoal.of_speed(record, bound, points[worst].value, allowed[worst])
