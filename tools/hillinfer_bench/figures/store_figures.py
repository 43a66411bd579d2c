# SPDX-License-Identifier: Apache-2.0
"""What a store holds, and where the time to the first token went, read and drawn as bars."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
_MOST_BARS = 32
_MOST_NAME = 60


class StoreRecordError(HillInferError):
    """A file is neither what a store holds nor the report of a run."""


@dataclass(frozen=True)
class Bar:
    """A bar of parts that lie one behind the other.

    Parameters
    ----------
    name
        What it is of.
    parts
        Sizes by what they are, in order.
    """

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Length of the bar."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StoreRecord:
    """What files say.

    Parameters
    ----------
    held
        Bytes of each store, by what they hold.
    first_tokens
        Seconds to the first token of each run, by where they went.
    """

    held: tuple[Bar, ...]
    first_tokens: tuple[Bar, ...]

    @classmethod
    def read(cls, files: Sequence[Path]) -> StoreRecord:
        """Read what `hillinfer store stats --json` and `hillinfer generate --report` wrote.

        Raises
        ------
        StoreRecordError
            Where a file cannot be read or is something else.
        """
        held, first_tokens = [], []
        for file in files:
            try:
                said = json.loads(read_plain(file, _MOST_BYTES))
                if not isinstance(said, dict):
                    raise ValueError("it is no object")
                if "namespaces" in said:
                    held.append(Bar(file.name, _held(said)))
                elif "first_token" in said:
                    first_tokens.append(Bar(file.name, _seconds(said["first_token"])))
                else:
                    raise ValueError("it names neither namespaces nor first_token")
            except OSError as error:
                raise StoreRecordError(f"cannot read {file}: {reason_of(error)}") from error
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise StoreRecordError(
                    f"{file} is neither of hillinfer store stats --json nor a report of hillinfer "
                    f"generate: {error!s:.200}"
                ) from error
        return cls(tuple(held), tuple(first_tokens))


def _held(said: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of a store by what they hold; all of them together are its size."""
    models = list(said["namespaces"])
    parts = {
        f"rows of model {one['namespace']!s:.12}": _number(one["row_bytes"])
        for one in models[: _MOST_BARS - 1]
    }
    if rest := models[_MOST_BARS - 1 :]:
        parts["rows of other models"] = sum(_number(one["row_bytes"]) for one in rest)
    parts["left empty in extents"] = _number(said["waste_bytes"])
    known = sum(parts.values()) + _number(said["free_bytes"])
    parts["index, and extents in use"] = max(0.0, _number(said["size_bytes"]) - known)
    parts["free"] = _number(said["free_bytes"])
    return {name: size for name, size in parts.items() if size}


def _seconds(said: dict[str, Any] | None) -> dict[str, float]:
    if said is None:
        raise ValueError("no token came")
    return {
        str(name).removesuffix("_seconds")[:_MOST_NAME]: _number(seconds)
        for name, seconds in list(said.items())[:_MOST_BARS]
    }


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool | str) or not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r:.40} is no amount")
    return number


# --- The figure ---

_WIDTH, _BAR_HEIGHT, _MARGIN = 11.0, 0.7, 1.6
# Told apart without colour too: each has a pattern of its own.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9")
_PATTERNS = ("", "//", "..", "xx", "\\\\", "++")
_EMPTY = {"free": "white", "left empty in extents": "0.85"}


def store_figure(record: StoreRecord) -> Figure:
    """Return a panel of what stores hold and one of times to the first token, a bar per file."""
    panels = [
        (bars, title, unit, text)
        for bars, title, unit, text in (
            (record.held, "What the store holds", 1 / 2**30, "GiB"),
            (record.first_tokens, "Time to the first token", 1.0, "seconds"),
        )
        if bars
    ]
    heights = [_BAR_HEIGHT * len(bars) + _MARGIN for bars, *_ in panels]
    figure = new_figure(_WIDTH, sum(heights))
    drawn = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (axes,), (bars, title, scale, unit) in zip(drawn, panels, strict=True):
        _draw(axes, bars, scale)
        axes.set_title(title, loc="left")
        axes.set_xlabel(unit)
    return figure


def _draw(axes: Axes, bars: Sequence[Bar], scale: float) -> None:
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    left = [0.0] * len(bars)
    for number, name in enumerate(names):
        sizes = [bar.parts.get(name, 0.0) * scale for bar in bars]
        axes.barh(
            range(len(bars)),
            sizes,
            left=left,
            label=plain_text(name),
            color=_EMPTY.get(name, _COLORS[number % len(_COLORS)]),
            hatch="" if name in _EMPTY else _PATTERNS[number // len(_COLORS) % len(_PATTERNS)],
            edgecolor="0.25",
            linewidth=0.5,
        )
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(bars)), [plain_text(bar.name) for bar in bars])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


# --- The same in words ---


def store_text(record: StoreRecord) -> str:
    """Return all bars as lines."""
    lines = []
    for bar in record.held:
        lines.append(f"{bar.name}: {format_bytes(bar.total)}")
        lines += [_line(name, format_bytes(size), bar, size) for name, size in bar.parts.items()]
    for bar in record.first_tokens:
        lines.append(f"{bar.name}: {bar.total:.3f} s to the first token")
        lines += [_line(name, f"{part:.3f} s", bar, part) for name, part in bar.parts.items()]
    return "\n".join(lines)


def _line(name: str, shown: str, bar: Bar, size: float) -> str:
    share = size / bar.total if bar.total else 0.0
    return f"  {name:<32} {shown:>12} {share:>7.1%}"
