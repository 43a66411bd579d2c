# SPDX-License-Identifier: Apache-2.0
"""Where documents lie, and the hulls that a plan chose on, read from its JSON and drawn."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer.errors import HillInferError, reason_of
from hillinfer.system.files import read_plain
from hillinfer.values import format_bytes
from hillinfer_bench.figures.canvas import new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BYTES = 64 << 20
_MOST_NAME = 60
# More hulls would hide one another; those that are used most are drawn.
_MOST_HULLS = 8
_MOST_BARS = 64
# Of more documents only chosen forms are named.
_MOST_NAMED = 2


class PlanRecordError(HillInferError):
    """A file is not what `hillinfer documents plan --json` printed."""


@dataclass(frozen=True)
class DrawnOption:
    """An option of a document: its form, bytes, and what a use is worth in seconds."""

    form: str
    byte_count: float
    value: float
    is_on_hull: bool
    is_chosen: bool


@dataclass(frozen=True)
class DrawnDocument:
    """A document of a plan.

    Parameters
    ----------
    name
        Its title where it has one.
    form, tier, byte_count
        What it lies as, where, and what it takes there.
    per_hour
        Uses in an hour.
    options
        All there are.
    """

    name: str
    form: str
    tier: str
    byte_count: float
    per_hour: float
    options: tuple[DrawnOption, ...]


@dataclass(frozen=True)
class PlanRecord:
    """A plan: its budget in bytes, and its documents, those that take most first."""

    budget: float
    documents: tuple[DrawnDocument, ...]

    @classmethod
    def read(cls, file: Path) -> PlanRecord:
        """Read what `hillinfer documents plan --json` printed.

        Raises
        ------
        PlanRecordError
            Where the file cannot be read or is something else.
        """
        try:
            said = json.loads(read_plain(file, _MOST_BYTES))
            documents = [_document(one) for one in said["documents"]]
            budget = _number(said["rules"]["dram_budget"])
        except OSError as error:
            raise PlanRecordError(f"cannot read {file}: {reason_of(error)}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PlanRecordError(
                f"{file} is not of hillinfer documents plan --json: {error!s:.200}"
            ) from error
        return cls(budget, tuple(sorted(documents, key=lambda one: -one.byte_count)))


def _document(said: dict[str, Any]) -> DrawnDocument:
    return DrawnDocument(
        str(said["title"] or said["name"])[:_MOST_NAME],
        str(said["after"])[:_MOST_NAME],
        str(said["tier"])[:_MOST_NAME],
        _number(said["byte_count"]),
        _number(said["uses_per_hour"]),
        tuple(
            DrawnOption(
                str(one["form"])[:_MOST_NAME],
                _number(one["byte_count"]),
                _finite(one["value"]),
                bool(one["is_on_hull"]),
                bool(one["is_chosen"]),
            )
            for one in said["options"]
        ),
    )


def _finite(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise ValueError(f"{value!r:.40} is no number")
    return number


def _number(value: Any) -> float:
    number = _finite(value)
    if number < 0:
        raise ValueError(f"{value!r:.40} is no amount")
    return number


# --- The figure ---

_WIDTH, _HULLS_HEIGHT, _BAR_HEIGHT, _MARGIN = 11.0, 5.0, 0.3, 1.6
# Told apart without colour too: each has a mark of its own.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "0.3", "#e69f00")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_TIERS = {"dram": "#0072b2", "drive": "0.75", "text": "white"}


def documents_figure(record: PlanRecord) -> Figure:
    """Return a panel of hulls, value of a use over bytes, and one of where documents lie."""
    shown = record.documents[:_MOST_BARS]
    heights = [_HULLS_HEIGHT, _BAR_HEIGHT * len(shown) + _MARGIN]
    figure = new_figure(_WIDTH, sum(heights))
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
    _draw_hulls(above, record)
    _draw_places(below, record, shown)
    return figure


def _draw_hulls(axes: Axes, record: PlanRecord) -> None:
    busiest = sorted(record.documents, key=lambda one: -one.per_hour)[:_MOST_HULLS]
    for number, document in enumerate(busiest):
        color, mark = _COLORS[number], _MARKS[number]
        every = [(one.byte_count / 2**20, one.value) for one in document.options]
        hull = sorted(
            (one.byte_count / 2**20, one.value) for one in document.options if one.is_on_hull
        )
        sizes, values = zip(*every, strict=True)
        axes.scatter(sizes, values, s=14, color=color, marker=mark, alpha=0.5)
        sizes, values = zip(*hull, strict=True)
        axes.plot(sizes, values, color=color, label=plain_text(document.name))
        for one in document.options:
            place = (one.byte_count / 2**20, one.value)
            if one.is_chosen:
                axes.scatter(*place, s=120, facecolors="none", edgecolors=color, marker=mark)
            if one.is_chosen or len(busiest) <= _MOST_NAMED:
                axes.annotate(
                    plain_text(one.form), place, (5, 5), textcoords="offset points", fontsize=7
                )
    axes.set_title("What a use of each form is worth: hulls, chosen forms ringed", loc="left")
    axes.set_xlabel("MiB in memory")
    axes.set_ylabel("seconds a use")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _draw_places(axes: Axes, record: PlanRecord, shown: tuple[DrawnDocument, ...]) -> None:
    sizes = [one.byte_count / 2**20 for one in shown]
    axes.barh(
        range(len(shown)),
        sizes,
        color=[_TIERS.get(one.tier, "white") for one in shown],
        edgecolor="0.25",
        linewidth=0.5,
    )
    for at, one in enumerate(shown):
        axes.annotate(
            f" {plain_text(one.form)}, {one.tier}", (sizes[at], at), fontsize=7, va="center"
        )
    axes.set_yticks(range(len(shown)), [plain_text(one.name) for one in shown], fontsize=7)
    axes.invert_yaxis()
    used = sum(one.byte_count for one in record.documents)
    title = f"Where documents lie: {format_bytes(used)} of {format_bytes(record.budget)} in memory"
    axes.set_title(title, loc="left")
    axes.set_xlabel("MiB in memory")
    axes.grid(axis="x", alpha=0.3)


# --- The same in words ---


def documents_text(record: PlanRecord) -> str:
    """Return where documents lie, and each one's hull, as lines."""
    used = sum(one.byte_count for one in record.documents)
    lines = [f"{format_bytes(used)} of {format_bytes(record.budget)} in memory"]
    for document in record.documents:
        lines.append(
            f"{document.name}: {document.form} on {document.tier}, "
            f"{format_bytes(document.byte_count)}, {document.per_hour:.2g} uses an hour"
        )
        hull = sorted(
            (one for one in document.options if one.is_on_hull), key=lambda one: one.value
        )
        lines += [
            f"  {'*' if one.is_chosen else ' '} {one.form:<14} {format_bytes(one.byte_count):>10} "
            f"{one.value:>9.3f} s a use"
            for one in hull
        ]
    return "\n".join(lines)
