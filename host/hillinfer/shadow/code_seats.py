# SPDX-License-Identifier: Apache-2.0
"""Codes that were read for one step, found as those are that stay."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.values import CHUNK_SLOTS, CodePool, ValueCodes
from hillinfer.statistics import Counters


class SeatedPool(CodePool):
    """The codes of one layer, with seats behind its slots for those that were read for a step.

    Parameters
    ----------
    row_bytes
        Of a code row and its exponents.
    """

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self._seated = np.zeros(0, np.int64)

    def seat(
        self, rows: NDArray[np.int64], numbers: NDArray[np.int64], codes: NDArray[np.uint8]
    ) -> None:
        """Let codes be found where they are until `unseat`, or until slots come or go.

        Parameters
        ----------
        rows, numbers
            As for `find`; nothing has a seat, and rows that have a slot get none.
        codes
            uint8 of shape (rows, row_bytes), contiguous.
        """
        (free,) = np.nonzero(self._slots[rows] < 0)
        self._seated = rows[free]
        self._slots[self._seated] = self.capacity + free
        self._numbers = np.concatenate([self._numbers, numbers.astype(np.int32)])
        starts = np.arange(0, len(rows), CHUNK_SLOTS) * codes.strides[0] + codes.ctypes.data
        self._bases = np.concatenate([self._bases, starts.astype(np.uint64)])
        self._describe()

    def unseat(self) -> None:
        """Let nothing be found that has no slot; harmless when done twice."""
        if len(self._seated):
            self._slots[self._seated] = -1
            self._seated = self._seated[:0]
            self._numbers = self._numbers[: self.capacity]
            self._bases = self._bases[: len(self._chunks)]
            self._describe()

    def resize(self, capacity: int) -> None:
        """Have so many slots; see `CodePool`. Seats go: who had one is read as a row."""
        self.unseat()
        super().resize(capacity)

    def forget(self, rows: NDArray[np.int64]) -> None:
        """Keep no codes of these row numbers; see `CodePool`."""
        self.unseat()
        super().forget(rows)


class CodeSeats:
    """Brings codes of a file to the layer that attends.

    Parameters
    ----------
    file
        Has codes of full groups.
    """

    def __init__(self, file: CodeFile) -> None:
        self.file = file
        self._pools: list[SeatedPool] = []

    def make_pool(self, row_bytes: int) -> CodePool:
        """Return the codes of one layer more."""
        self._pools.append(SeatedPool(row_bytes))
        return self._pools[-1]

    def are_wanted(self, layer: int) -> bool:
        """Say whether a layer has not the codes of all tokens."""
        pool = self._pools[layer]
        return pool.capacity < pool.covered

    @contextmanager
    def seated(
        self, layer: int, key: Hashable, values: ValueCodes, own: Counters
    ) -> Iterator[None]:
        """Let what was begun by a key be found, and afterwards offer it to those that stay.

        Parameters
        ----------
        layer, key
            Whose.
        values
            Has the pools that were made here.
        own
            As for `CodeFile.take`.

        Raises
        ------
        ColdPoolError
            Where it cannot be read, or is not what was written.
        """
        brought = self.file.take(layer, key, own)
        if brought is None:
            yield
            return
        pool = self._pools[layer]
        with values.changing:
            pool.seat(brought.rows, brought.numbers, brought.codes)
        try:
            yield
        finally:
            with values.changing:
                pool.unseat()
        # Not before: what gives way for them was attended to.
        values.offer(layer, brought.rows, brought.numbers, brought.codes)
