# SPDX-License-Identifier: Apache-2.0
"""Room for the shadows of one layer, side by side in memory."""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer.storage.huge_run import HugeRun

# Address space is taken in runs of at least so many bytes; memory only with each place.
RUN_BYTES = 32 << 20


class ShadowArena:
    """Gives every shadow the first free place, so that a sequence's lie next to each other.

    A processor reads on from one segment into the next without waiting, and huge pages spare it
    translations. Where the system cannot do it each shadow is memory of its own.

    Parameters
    ----------
    place_bytes
        Of a shadow, whole pages.
    """

    def __init__(self, place_bytes: int) -> None:
        self._place_bytes = place_bytes
        self._runs: list[HugeRun] = []
        self._refused = not hasattr(mmap, "MADV_HUGEPAGE")
        self._growing = threading.Lock()

    def take(self) -> NDArray[np.uint8]:
        """Return page-aligned zeros, uint8 (place_bytes,), which are free again once forgotten."""
        with self._growing:
            for run in self._runs:
                memory = run.take()
                if memory is not None:
                    return memory
            memory = None if self._refused else self._from_new_run()
        return aligned_buffer(self._place_bytes) if memory is None else memory

    @property
    def runs(self) -> tuple[HugeRun, ...]:
        """What shadows lie in; those that are memory of their own lie in none."""
        return tuple(self._runs)

    def _from_new_run(self) -> NDArray[np.uint8] | None:
        try:
            run = HugeRun(self._place_bytes, -(-RUN_BYTES // self._place_bytes))
        except OSError:
            self._refused = True
            return None
        self._runs.append(run)
        return run.take()
