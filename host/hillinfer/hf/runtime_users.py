# SPDX-License-Identifier: Apache-2.0
"""The caches that share one runtime."""

from __future__ import annotations

from hillinfer.runtime import Runtime
from hillinfer.storage.sequence import Sequence


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

    def leave(self, rows: list[Sequence]) -> None:
        """Free the sequences of one cache, count it no more and close the runtime after the last.

        Parameters
        ----------
        rows
            The sequence of each batch row; empty afterwards.
        """
        for row in {id(row): row for row in rows}.values():
            self._runtime.release(row)
        del rows[:]
        self._count -= 1
        if self._count == 0:
            self._runtime.close()
