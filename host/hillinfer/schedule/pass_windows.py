# SPDX-License-Identifier: Apache-2.0
"""The pass under way: when its layers want rows, and how long the drive is free in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from hillinfer.drive.read_turns import QUANTUM_BYTES, ReadTurns
from hillinfer.schedule.drive_rates import DriveRates
from hillinfer.schedule.slack_table import SlackTable
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder

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
