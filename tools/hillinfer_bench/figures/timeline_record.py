# SPDX-License-Identifier: Apache-2.0
"""A timeline read back, as one matrix per column."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import HillInferError
from hillinfer.plain_file import open_plain, plain_lines
from hillinfer.system_reason import reason_of
from hillinfer.timeline.pool_timeline import COLUMNS

Matrix = NDArray[np.float64]
_MOST = 1 << 53
# A hundred thousand steps of a large model.
_MOST_BYTES = 1 << 30
# A layer has a line in every step, but for those that were not whole.
_MOST_EMPTY = 64
_MOST_LAYERS = 512


class TimelineError(HillInferError):
    """A file is no timeline of the pools."""


@dataclass(frozen=True)
class TimelineRecord:
    """What happened per layer and step, sequences of the same step added up.

    Parameters
    ----------
    steps
        int64, the numbers of the steps, ascending.
    columns
        By name, float64 of shape (layers, steps); NaN where a layer has no line in a step.
    """

    steps: NDArray[np.int64]
    columns: dict[str, Matrix]

    @property
    def hit_rates(self) -> Matrix:
        """Share of selected rows found in DRAM, (layers, steps)."""
        wanted = self.columns["hot_rows"] + self.columns["cold_rows"]
        rates: Matrix = self.columns["hot_rows"] / np.where(wanted > 0, wanted, np.nan)
        return rates

    @property
    def hit_rate(self) -> float:
        """Share of all selected rows found in DRAM; 1.0 where none was wanted."""
        hot, cold = (float(np.nansum(self.columns[name])) for name in ("hot_rows", "cold_rows"))
        return hot / (hot + cold) if hot + cold else 1.0

    @classmethod
    def read(cls, file: Path) -> TimelineRecord:
        """Read a file that `PoolTimeline` wrote; a last line that was cut off is left out.

        Raises
        ------
        TimelineError
            Where it cannot be read or is something else; the message names the line.
        """
        try:
            with open_plain(file, "ascii", _MOST_BYTES) as opened:
                numbers = chain.from_iterable(_entries(file, csv.reader(plain_lines(opened))))
                entries = np.fromiter(numbers, np.float64).reshape(-1, len(COLUMNS))
        except OSError as error:
            raise TimelineError(f"cannot read the timeline {file}: {reason_of(error)}") from error
        except (ValueError, csv.Error) as error:
            raise TimelineError(f"{file} is no pool timeline: {error}") from error
        if not len(entries):
            raise TimelineError(f"{file} holds no steps: nothing was decoded while it was written")
        steps, column_of = np.unique(entries[:, 0].astype(np.int64), return_inverse=True)
        layers = entries[:, 1].astype(np.int64)
        shape = int(layers.max()) + 1, len(steps)
        if shape[0] > len(entries):
            raise TimelineError(f"{file} names layer {shape[0] - 1} but has {len(entries)} lines")
        if shape[0] > _MOST_LAYERS:
            raise TimelineError(f"{file} names {shape[0]} layers: no model has so many")
        if shape[0] * shape[1] > _MOST_EMPTY * len(entries):
            raise TimelineError(
                f"{file} names {shape[0]} layers and {shape[1]} steps but has {len(entries)} lines"
            )
        lines_of = np.zeros(shape)
        np.add.at(lines_of, (layers, column_of), 1)
        columns = {}
        for number, name in enumerate(COLUMNS[2:], start=2):
            sums = np.zeros(shape)
            np.add.at(sums, (layers, column_of), entries[:, number])
            columns[name] = np.where(lines_of > 0, sums, np.nan)
        return cls(steps, columns)


def _entries(file: Path, lines: Iterator[list[str]]) -> Iterator[tuple[float, ...]]:
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        raise TimelineError(
            f"{file} is no pool timeline: its first line must be {','.join(COLUMNS)}"
        )
    cut_off: str | None = None
    for number, cells in enumerate(lines, start=2):
        if cut_off is not None:
            raise TimelineError(cut_off)
        try:
            entry = tuple(_number(name, cell) for name, cell in zip(COLUMNS, cells, strict=True))
        except (ValueError, OverflowError):
            # A process that was killed may leave half a line, but only at the end.
            cut_off = f"{file}, line {number}: {','.join(cells)[:80]!r} is no line of a timeline"
        else:
            yield entry
    if cut_off is not None and number == 2:
        raise TimelineError(cut_off)


def _number(name: str, cell: str) -> float:
    value = float(cell) if name.endswith("_seconds") else float(int(cell))
    if not 0 <= value <= _MOST:
        raise ValueError(cell)
    return value
