# SPDX-License-Identifier: Apache-2.0
"""Whether quality stands beside every time, and how low it is."""

from __future__ import annotations

from collections.abc import Sequence

from hillinfer_bench.decode.case import REAL
from hillinfer_bench.decode.goal_bound import AtLeast, AtMost
from hillinfer_bench.decode.goal_point import GoalPoint
from hillinfer_bench.decode.goal_record import GoalRecord, unjudged
from hillinfer_bench.decode.row import BenchRow
from hillinfer_bench.systems.table import HILLINFER, REFERENCES, selects

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
    timed = [row for row in rows if row.median_ms is not None and selects(row.system)]
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
