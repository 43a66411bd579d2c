# SPDX-License-Identifier: Apache-2.0
"""How far each way is from the full cache on the very questions that both answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from hillinfer_bench.study.accuracy import Answers, by_length
from hillinfer_bench.study.ways import StudyWay

# Whose answers are numbers, of which each digit counts.
_RECALLED = ("lines", "needle")


@dataclass(frozen=True)
class BesideFull:
    """One way beside the full cache, in one column of the table.

    Parameters
    ----------
    way, column
        Titles of both.
    questions
        Answered by both.
    nll
        By how many nats a digit is less expected than by the full cache, mean.
    error
        Standard error of that mean over questions; None of a single one.
    right, full_right
        Questions that it has right, and that the full cache has.
    """

    way: str
    column: str
    questions: int
    nll: float
    error: float | None
    right: int
    full_right: int

    def as_record(self) -> dict[str, Any]:
        """Return what the report says."""
        return asdict(self)


def beside_full(answers: Answers, ways: Sequence[StudyWay]) -> list[BesideFull]:
    """Return every way beside the full cache, which is the first, for each length of each task."""
    columns: dict[str, list[Mapping[str, Any]]] = {}
    for told in answers.values():
        if told["task"] in _RECALLED:
            columns.setdefault(by_length(told), []).append(told["scores"])
    full = ways[0].title
    made = []
    for way in ways[1:]:
        for column, scores in columns.items():
            both = [(one[way.title], one[full]) for one in scores if {way.title, full} <= set(one)]
            if not both:
                continue
            more = [own["nll"] - other["nll"] for own, other in both]
            made.append(
                BesideFull(
                    way.title,
                    column,
                    len(both),
                    fmean(more),
                    stdev(more) / math.sqrt(len(more)) if len(more) > 1 else None,
                    round(sum(own["right"] for own, _ in both)),
                    round(sum(other["right"] for _, other in both)),
                )
            )
    return made


def beside_full_table(rows: Sequence[BesideFull]) -> str:
    """Return a table as Markdown: a row for each way, a column for each length of each task."""
    columns = list(dict.fromkeys(one.column for one in rows))
    found = {(one.way, one.column): one for one in rows}
    heads = [f"{one}: NLL less the full cache's, right" for one in columns]
    lines = ["| way | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for way in dict.fromkeys(one.way for one in rows):
        told = [_cell(found.get((way, column))) for column in columns]
        lines.append("| " + " | ".join([way, *told]) + " |")
    return "\n".join(lines)


def _cell(one: BesideFull | None) -> str:
    if one is None:
        return ""
    error = "" if one.error is None else f" ± {one.error:.2f}"
    return f"{one.nll:+.2f}{error}, {one.right} beside {one.full_right} of {one.questions}"
