# SPDX-License-Identifier: Apache-2.0
"""The pictures of EvicPress: quality against first token, and rate against first token."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hillinfer.errors import HillInferError, reason_of
from hillinfer.system.files import read_plain
from hillinfer_bench.figures.canvas import new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_BYTES = 64 << 20
_WIDTH, _HEIGHT = 12.0, 10.0
# Told apart without colour too.
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")


class StudyRecordError(HillInferError):
    """A file is not a report of the subcommand `evicpress`."""


@dataclass(frozen=True)
class DrawnRival:
    """What one rival reached.

    Parameters
    ----------
    name
        As tables call it.
    first_token, agreement
        Median in seconds, and mean.
    curve
        Requests a second, and the median first token at that rate.
    """

    name: str
    first_token: float
    agreement: float
    curve: tuple[tuple[float, float], ...]


def read_rivals(file: Path) -> tuple[DrawnRival, ...]:
    """Read a report of `hillinfer-bench evicpress`.

    Raises
    ------
    StudyRecordError
        Where the file cannot be read or is something else.
    """
    try:
        rows = json.loads(read_plain(file, _MOST_BYTES))["rows"]
        return tuple(_rival(row) for row in rows)
    except OSError as error:
        raise StudyRecordError(f"cannot read {file}: {reason_of(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StudyRecordError(
            f"{file} is not of hillinfer-bench evicpress: {error!s:.200}"
        ) from error


def evicpress_figure(rivals: tuple[DrawnRival, ...]) -> Figure:
    """Return a panel of agreement over first token, and one of first token over rate."""
    figure = new_figure(_WIDTH, _HEIGHT)
    above, below = figure.subplots(2, 1)
    for number, one in enumerate(rivals):
        mark, label = _MARKS[number % len(_MARKS)], plain_text(one.name)
        above.scatter(one.first_token, one.agreement, marker=mark, s=50, label=label)
        if one.curve:
            rates, seconds = zip(*one.curve, strict=True)
            below.plot(rates, seconds, marker=mark, markersize=4, label=label)
    above.set_title("Quality against first token (up and left is better)", loc="left")
    above.set_xlabel("first token, median seconds")
    above.set_ylabel("share of tokens that are those of all rows")
    below.set_title("First token at a rate, computed from times measured alone", loc="left")
    below.set_xlabel("requests a second")
    below.set_ylabel("first token, median seconds")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    return figure


def _rival(row: dict[str, Any]) -> DrawnRival:
    curve = tuple((_number(rate), _number(seconds)) for rate, seconds in row["rate_curve"])
    return DrawnRival(
        str(row["rival"])[:60], _number(row["first_token_p50"]), _number(row["agreement"]), curve
    )


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool | str) or not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r:.40} is no amount")
    return number
