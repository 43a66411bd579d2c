# SPDX-License-Identifier: Apache-2.0
"""With everything in DRAM: how near to the loop's floor, and to transformers' own caches."""

from __future__ import annotations

from collections.abc import Sequence

from hillinfer_bench.decode.goal_bound import AtMost, MoreThan
from hillinfer_bench.decode.goal_point import GoalPoint
from hillinfer_bench.decode.goal_record import GoalRecord, judged, unjudged
from hillinfer_bench.decode.ratio import Ratio
from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.systems.table import FLOOR, HILLINFER, IN_MEMORY, IN_MEMORY_TRUE, STOCK

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
    own = _points([one for one in of_goal if one.system == IN_MEMORY])
    other = _points([one for one in ratios if (one.name, one.system) == (OVER_FLOOR, IN_MEMORY)])
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
        points = _points([one for one in of_goal if one.system == system])
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
        return unjudged(_stock_name(), _points(ratios), _STOCK_BOUND, reason)
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
    return judged(_stock_name(), _points(own), _STOCK_BOUND, missing)


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


def _points(ratios: Sequence[Ratio]) -> list[GoalPoint]:
    return [GoalPoint(one.value, one.row, one.flagged) for one in ratios]


def _ratio(
    name: str, value: float, row: BenchRow, against: BenchRow, others: Sequence[BenchRow]
) -> Ratio:
    flagged = any(one.flagged for one in (row, *others))
    return Ratio(name, row.system, row.name, against.name, value, row.context, row.alpha, flagged)


def _median(row: BenchRow) -> float:
    assert row.median_ms is not None
    return row.median_ms
