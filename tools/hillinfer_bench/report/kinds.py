# SPDX-License-Identifier: Apache-2.0
"""Which kind of machine figures are from, and reports of several kinds as one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer.errors import HillInferError, reason_of
from hillinfer.native.library import native_library
from hillinfer.system.files import read_plain
from hillinfer.system.machine import ProcessorFacts

# Reports have kilobytes.
_MOST_BYTES = 1 << 26
# What tells rows of one report apart, the number type left out: a kind of machine has its own.
_ROW_KEY = ("model", "context", "batch", "alpha", "budget_share", "part", "system")
_MOST_SHOWN = 60


class KindsError(HillInferError):
    """Reports cannot be laid side by side; the message says which and why."""


@dataclass(frozen=True)
class MachineKind:
    """What a figure depends on beside the code: the processor, and what models compute in.

    Parameters
    ----------
    processor
        As the kernel calls it.
    variant
        Instruction set that the native library takes here, such as `avx2`.
    number_type
        Of the model, such as `bfloat16`.
    """

    processor: str
    variant: str
    number_type: str

    @classmethod
    def here(cls, number_type: object) -> MachineKind:
        """Return the kind of this machine, for a model of a type; `torch.bfloat16` or its name."""
        variant = native_library().variants[0].value
        return cls(ProcessorFacts.read().name, variant, str(number_type).removeprefix("torch."))

    def as_record(self) -> dict[str, str]:
        """Return it as every report has it."""
        return {
            "processor": self.processor,
            "processor_variant": self.variant,
            "number_type": self.number_type,
        }

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> MachineKind:
        """Return the kind that a report names.

        Raises
        ------
        KeyError, TypeError
            Where it names none.
        """
        names = ("processor", "processor_variant", "number_type")
        given = [report[name] for name in names]
        if not all(isinstance(one, str) for one in given):
            raise TypeError(f"no texts: {given!r}")
        return cls(*given)

    @property
    def title(self) -> str:
        """The heading of its columns."""
        return f"{self.variant}, {self.number_type}"


def read_reports(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the reports of `hillinfer-bench decode` in some files.

    Raises
    ------
    KindsError
        Where one cannot be read or is something else; the message names it and the way out.
    """
    reports = []
    for file in files:
        try:
            found = json.loads(read_plain(file, _MOST_BYTES).decode("utf-8"))
            MachineKind.of(found)
            kinds_table([found])
        except OSError as error:
            raise KindsError(f"cannot read the report {file}: {reason_of(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]!r}"
            raise KindsError(
                f"{file} is no report of `hillinfer-bench decode` of this version ({reason}): "
                "give its bench.json, or measure again"
            ) from error
        reports.append(found)
    return reports


def kinds_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows and goals of several reports side by side, as Markdown.

    A column names its kind of machine, so no figure stands without it; where two reports are of one
    kind, their processors tell them apart, or their numbers.

    Parameters
    ----------
    reports
        At least one, from `read_reports`.
    """
    kinds = [MachineKind.of(report) for report in reports]
    titles = _titles(kinds)
    keys = dict.fromkeys(_key(row) for report in reports for row in report["rows"])
    rows = [{_key(row): row for row in report["rows"]} for report in reports]
    lines = [[*_HEADS, *(f"{title}: {what}" for title in titles for what in ("type", "median ms"))]]
    for key in keys:
        cells = [cell for own in rows for cell in _cells(own.get(key))]
        lines.append([*_named(key), *cells])
    goals = [["goal", *(f"{title}: reached" for title in titles)]]
    for goal in dict.fromkeys(one["goal"] for report in reports for one in report["goals"]):
        found = [
            next((one for one in report["goals"] if one["goal"] == goal), None)
            for report in reports
        ]
        if any(one is not None and one["reached"] is not None for one in found):
            goals.append([goal, *map(_reached, found)])
    named = "\n".join(
        f"- {title}: {kind.processor or 'processor unknown'}"
        for title, kind in zip(titles, kinds, strict=True)
    )
    told = "! marks flagged rows, and goals with one behind them."
    return "\n\n".join([named, _markdown(lines), _markdown(goals), told])


_HEADS = ("model", "context", "batch", "α", "budget", "part", "system")


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    key = tuple(row[name] for name in _ROW_KEY)
    if not all(isinstance(one, str | int | float) for one in key):
        raise TypeError(f"row {key!r} is no row")
    return key


def _named(key: tuple[Any, ...]) -> list[str]:
    model, context, batch, alpha, budget, part, system = key
    return [
        *(str(model), str(context), str(batch), f"{float(alpha):g}"),
        *(f"{100 * float(budget):.12g}%", str(part), str(system)),
    ]


def _cells(row: Mapping[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    median = row.get("median_ms")
    if median is None:
        return str(row["type"]), "not measured"
    return str(row["type"]), f"{float(median):.2f}" + ("!" if row["flagged"] else "")


def _reached(goal: Mapping[str, Any] | None) -> str:
    if goal is None or goal["reached"] is None:
        return ""
    met = {True: ", met", False: ", not met", None: ""}[goal["met"]]
    return f"{float(goal['reached']):.3g}{'!' if goal['flagged'] else ''}{met}"


def _titles(kinds: Sequence[MachineKind]) -> list[str]:
    """Return a heading for each kind, no two alike."""
    titles = [kind.title for kind in kinds]
    if len(set(titles)) < len(titles):
        titles = [f"{kind.title}, {kind.processor}" for kind in kinds]
    if len(set(titles)) < len(titles):
        titles = [f"{number}: {title}" for number, title in enumerate(titles, start=1)]
    return titles


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *others = ("| " + " | ".join(_plain(one) for one in line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *others])


def _plain(text: str) -> str:
    # A report may come from anywhere: no cell ends a row, and nothing moves a terminal's cursor.
    return "".join(one if one.isprintable() and one != "|" else "?" for one in text)
