# SPDX-License-Identifier: Apache-2.0
"""Writes the timeline of the pools as it happens."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from dataclasses import astuple, fields
from io import FileIO
from pathlib import Path

from hillinfer.errors import HillInferWarning
from hillinfer.pools.layer_step import LayerStep
from hillinfer.timeline.private_file import private_file

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
