# SPDX-License-Identifier: Apache-2.0
"""Compute windows: how long a layer takes, and when the drive is free beside the pass under way."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.read_turns import QUANTUM_BYTES, ReadTurns
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder

# --- How long one layer computes ---

# New tokens m and tokens before them P.
NEW_TOKENS = (1, 16, 64, 256, 1024)
PREFIX_TOKENS = (0, 1024, 4096, 16384, 65536)
# What one observation weighs against those before it.
_WEIGHT = 0.25


@dataclass(frozen=True)
class _Corner:
    """A point of the grid, and what it weighs between its neighbours."""

    row: int
    column: int
    weight: float


class SlackTable:
    """Compute windows C(m, P) of one layer in seconds, on a grid, bilinear between its points.

    Attention costs m · P and everything else m, so between points a plane in each of the two is
    what is expected, and beyond the last ones, too. Points that nobody measured are unknown until a
    pass comes near them. Any thread may use it.

    Parameters
    ----------
    new_tokens, prefix_tokens
        Of the grid, ascending, two of each at least.
    seconds
        float64 (new_tokens, prefix_tokens); NaN where unknown, as all are where None.
    """

    def __init__(
        self,
        new_tokens: Sequence[int] = NEW_TOKENS,
        prefix_tokens: Sequence[int] = PREFIX_TOKENS,
        seconds: NDArray[np.float64] | None = None,
    ) -> None:
        self.new_tokens, self.prefix_tokens = tuple(new_tokens), tuple(prefix_tokens)
        shape = len(self.new_tokens), len(self.prefix_tokens)
        if min(shape) < 2 or any(
            list(axis) != sorted(set(axis)) for axis in (self.new_tokens, self.prefix_tokens)
        ):
            raise ValueError(f"a grid of {shape} points must ascend and have two of each axis")
        self._seconds = np.full(shape, math.nan) if seconds is None else seconds.copy()
        if self._seconds.shape != shape:
            raise ValueError(f"windows of shape {self._seconds.shape} are none of a grid {shape}")
        self._changing = threading.Lock()

    @classmethod
    def measured(
        cls,
        measure: Callable[[int, int], float],
        new_tokens: Sequence[int] = NEW_TOKENS,
        prefix_tokens: Sequence[int] = PREFIX_TOKENS,
    ) -> SlackTable:
        """Return a table whose points are what a call returns for new tokens and those before."""
        points = [[measure(new, before) for before in prefix_tokens] for new in new_tokens]
        return cls(new_tokens, prefix_tokens, np.array(points, np.float64))

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The points, a copy."""
        with self._changing:
            return self._seconds.copy()

    def window(self, new_tokens: int, prefix_tokens: int) -> float | None:
        """Return C in seconds, None where nothing near is known."""
        corners = self._corners(new_tokens, prefix_tokens)
        with self._changing:
            found = sum(one.weight * self._seconds[one.row, one.column] for one in corners)
        return None if math.isnan(found) else max(0.0, float(found))

    def observe(self, new_tokens: int, prefix_tokens: int, seconds: float) -> None:
        """Learn what a layer took; points near it move by the share that they have in it.

        Points that were unknown become what it says, as if time went with the new tokens alone.
        """
        corners = self._corners(new_tokens, prefix_tokens)
        expected = self.window(new_tokens, prefix_tokens)
        with self._changing:
            for one in corners:
                at = one.row, one.column
                if math.isnan(self._seconds[at]):
                    self._seconds[at] = seconds * self.new_tokens[one.row] / max(1, new_tokens)
            if expected is None:
                return
            # The least change of points that makes them say what was seen.
            square = sum(one.weight**2 for one in corners)
            for one in corners:
                at = one.row, one.column
                step = _WEIGHT * (seconds - expected) * one.weight / square
                self._seconds[at] = max(0.0, self._seconds[at] + step)

    # --- as a file holds it ----------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return it as numbers and lists."""
        return {
            "new_tokens": list(self.new_tokens),
            "prefix_tokens": list(self.prefix_tokens),
            "seconds": [
                [None if math.isnan(one) else one for one in row] for row in self.seconds.tolist()
            ],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> SlackTable:
        """Return what `as_json` returned.

        Raises
        ------
        ValueError, KeyError, TypeError
            Where it is none of that.
        """
        points = [
            [math.nan if one is None else float(one) for one in row] for row in record["seconds"]
        ]
        seconds = np.array(points, np.float64)
        if (seconds < 0).any() or np.isinf(seconds).any():
            raise ValueError("windows must be 0 or more")
        return cls(
            [int(one) for one in record["new_tokens"]],
            [int(one) for one in record["prefix_tokens"]],
            seconds,
        )

    # --- inside ----------------------------------------------------------------------------

    def _corners(self, new_tokens: int, prefix_tokens: int) -> list[_Corner]:
        """Return the points around a place, with weights of sum 1; none of weight 0."""
        rows = _between(self.new_tokens, new_tokens)
        columns = _between(self.prefix_tokens, prefix_tokens)
        return [
            _Corner(row, column, own * other)
            for row, own in rows
            for column, other in columns
            if own * other
        ]


def _between(axis: tuple[int, ...], value: int) -> list[tuple[int, float]]:
    """Return both neighbours of a value on an axis, and what each weighs; beyond the ends, too."""
    low = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    share = (value - axis[low]) / (axis[low + 1] - axis[low])
    return [(low, 1 - share), (low + 1, share)]


# --- The pass under way ---

# ε: what of a window is not counted on.
_MARGIN_SECONDS = 0.0002
# Less than this is no waiting but looking.
_UNTOLD_NS = 50_000


@dataclass
class PassCounts:
    """What passes of several tokens left to the drive, running totals.

    Parameters
    ----------
    windows, window_seconds
        Times between two layers' reads, and how long they were.
    slack_seconds
        What of them reading ahead was expected to leave.
    bubble_seconds
        How long layers waited for rows.
    """

    windows: int = 0
    window_seconds: float = 0.0
    slack_seconds: float = 0.0
    bubble_seconds: float = 0.0


class PassWindows:
    """Tells a drive's turns when writes fit between the reads of a pass.

    A window is the time from when a layer has all its rows until the next one wants some. What
    reads ahead do not need of it is slack. Where they need all of it, nothing is written that
    nobody waits for, until the last read is done (Tutti, section 3.3). One thread at a time.

    Parameters
    ----------
    table
        What windows were so far; learns.
    turns
        Of the drive.
    row_bytes
        Bytes of a row.
    rates
        Of the drive; None where nobody knows, and writes go whenever nobody reads.
    recorder
        Notes waiting.
    clock
        Returns seconds.
    keep
        Called with the table when nothing more is learned, where anything was; None forgets it.

    Attributes
    ----------
    table, rates
        As given; the rates may be told later.
    """

    def __init__(
        self,
        table: SlackTable,
        turns: ReadTurns,
        row_bytes: int,
        rates: DriveRates | None = None,
        recorder: Recorder = SILENT,
        clock: Callable[[], float] = time.monotonic,
        keep: Callable[[SlackTable], None] | None = None,
    ) -> None:
        self._keep = keep
        self.table, self.rates = table, rates
        self._turns = turns
        self._row_bytes = row_bytes
        self._recorder = recorder
        self._clock = clock
        self._counts = PassCounts()
        # The layer that had its rows last, when, and of what pass.
        self._gone: tuple[int, float, int, int] | None = None
        self._until: float | None = None
        turns.window = self

    def come(self, layer: int, new_tokens: int, prefix_tokens: int) -> None:
        """Learn that a layer wants its rows now.

        Parameters
        ----------
        layer
            Which.
        new_tokens, prefix_tokens
            Tokens of the pass, and those before them.
        """
        gone, self._gone, self._until = self._gone, None, None
        if gone is None or gone[0] + 1 != layer or gone[2:] != (new_tokens, prefix_tokens):
            return
        seconds = self._clock() - gone[1]
        self._counts.windows += 1
        self._counts.window_seconds += seconds
        self.table.observe(new_tokens, prefix_tokens, seconds)

    def go(self, layer: int, new_tokens: int, prefix_tokens: int, ahead_rows: int) -> None:
        """Learn that a layer has all its rows and another one follows; `come` is next.

        Parameters
        ----------
        layer, new_tokens, prefix_tokens
            As for `come`.
        ahead_rows
            Most rows that are read for the next layer meanwhile.
        """
        now = self._clock()
        self._gone = layer, now, new_tokens, prefix_tokens
        window = self.table.window(new_tokens, prefix_tokens)
        if window is None or self.rates is None:
            self._until = None
            return
        left = (
            window
            - self.rates.read_seconds(ahead_rows * self._row_bytes, QUANTUM_BYTES)
            - _MARGIN_SECONDS
        )
        self._counts.slack_seconds += max(0.0, left)
        self._until = now + left
        self._turns.wake()

    def end(self) -> None:
        """Learn that the last layer has its rows: nothing of this pass is read any more."""
        self._gone = self._until = None
        self._turns.wake()

    def note_wait(self, layer: int, started: int) -> None:
        """Note that a layer waited for rows since `started`, of `time.perf_counter_ns`."""
        stop = time.perf_counter_ns()
        self._counts.bubble_seconds += (stop - started) / 1e9
        if stop - started > _UNTOLD_NS:
            self._recorder.note(Lane.BUBBLES, "rows", started, stop, layer=layer)

    def is_open(self, byte_count: int) -> bool:
        """Return whether a write ends before rows are wanted; any thread may ask."""
        until, rates = self._until, self.rates
        if until is None or rates is None:
            return True
        pace = rates.write * (1 - rates.mixing_loss)
        return pace > 0 and self._clock() + byte_count / pace <= until

    def close(self) -> None:
        """Learn nothing more, and let what was learned be kept."""
        if self._counts.windows and self._keep is not None:
            self._keep(self.table)

    def counts(self) -> dict[str, int | float]:
        """Return what was counted so far, by name, with what became of writes."""
        return {**asdict(self._counts), **self._turns.counts()}

    def count_into(self, counters: Counters) -> None:
        """Bring an engine's running totals up to date."""
        counted = self._turns.counts()
        counters.bubble_seconds = self._counts.bubble_seconds
        counters.slack_seconds = self._counts.slack_seconds
        counters.deferred_writes = int(counted["deferred_writes"])
        counters.slack_write_bytes = int(counted["slack_bytes"])
