# SPDX-License-Identifier: Apache-2.0
"""Writes what happened to the hot pools, one line per layer and decode step."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from io import FileIO
from pathlib import Path

from hillinfer.errors import HillInferWarning
from hillinfer.trace.trace_file import private_file

# --- What is written of a layer and step ---


@dataclass(frozen=True)
class ReadCost:
    """Calls to the drive, and the bytes they brought.

    Parameters
    ----------
    reads, byte_count
        How many.
    """

    reads: int = 0
    byte_count: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.reads + other.reads, self.byte_count + other.byte_count)


@dataclass
class LayerStep:
    """One entry of the pools' timeline: one sequence in one layer and step.

    Parameters
    ----------
    step, layer, length
        Which step and layer, and the context length N.
    hot_rows, cold_rows
        Selected rows found in DRAM (hits) and on the drive (misses).
    promoted, demoted
        Rows that became hot, and those that gave way to them.
    reads, read_bytes
        Calls to the drive and the bytes they brought.
    wait_seconds
        Time that attention waited for rows.
    """

    step: int
    layer: int
    length: int
    hot_rows: int = 0
    cold_rows: int = 0
    promoted: int = 0
    demoted: int = 0
    reads: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0

    def note_reads(self, cost: ReadCost) -> None:
        """Add what some rows took to read."""
        self.reads += cost.reads
        self.read_bytes += cost.byte_count


# --- The file ---

COLUMNS = tuple(field.name for field in fields(LayerStep))
_BUFFER_BYTES = 1 << 14


class PoolTimeline:
    """A CSV file with a header and one line per layer, step and sequence.

    Lines come in the order in which promotions end, from any thread. Where the file cannot be
    written any more, a warning says so once and the timeline ends: generation goes on.

    Parameters
    ----------
    file
        Where to; replaced, and readable by its owner only.

    Raises
    ------
    SettingsError
        Where the file cannot be made.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._out: FileIO | None = private_file(file, "the pool timeline", "--pool-timeline")
        self._waiting = bytearray((",".join(COLUMNS) + "\n").encode())

    def observe(self, entry: LayerStep) -> None:
        """Write one line; harmless after `close`."""
        # A microsecond is less than what a wait takes to measure.
        cells = [f"{cell:.6f}" if isinstance(cell, float) else str(cell) for cell in astuple(entry)]
        with self._lock:
            self._waiting += (",".join(cells) + "\n").encode()
            if len(self._waiting) >= _BUFFER_BYTES:
                self._flush()

    def flush(self) -> None:
        """Bring what was observed so far into the file."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Bring everything into the file and close it; harmless when done twice."""
        with self._lock:
            self._flush()
            out, self._out = self._out, None
            if out is not None:
                try:
                    out.close()
                except OSError as error:
                    self._warn(error)

    def _flush(self) -> None:
        if self._out is None:
            self._waiting.clear()
            return
        out = self._out
        try:
            while self._waiting:
                written = out.write(self._waiting)
                del self._waiting[:written]
        except OSError as error:
            self._out = None
            self._waiting.clear()
            with suppress(OSError):
                out.close()
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"the pool timeline {self._file} ends early: {error.strerror}; generation goes on",
            HillInferWarning,
            stacklevel=4,
        )
