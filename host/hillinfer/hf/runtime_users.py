# SPDX-License-Identifier: Apache-2.0
"""The caches that share one runtime."""

from __future__ import annotations

from hillinfer.hf.batch import Batch
from hillinfer.runtime import Runtime


class RuntimeUsers:
    """Counts the caches that share a runtime and closes it after the last.

    Parameters
    ----------
    runtime
        What they share.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._count = 0

    def join(self) -> None:
        """Count one cache more."""
        self._count += 1

    def leave(self, batch: Batch) -> None:
        """Free the sequences of one cache, count it no more and close the runtime after the last.

        Parameters
        ----------
        batch
            That cache's rows; empty afterwards.
        """
        batch.clear()
        self._count -= 1
        if self._count == 0:
            self._runtime.close()
