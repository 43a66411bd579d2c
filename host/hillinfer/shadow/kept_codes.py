# SPDX-License-Identifier: Apache-2.0
"""Keeps codes of values in DRAM, and in a file on the drive where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import BudgetError, HillInferError
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.values import SegmentValues, ValueCodes
from hillinfer_model.channel_statistics import ChannelStatistics


class KeptCodes:
    """Keeps codes of values wherever there is room for them.

    Parameters
    ----------
    values
        In DRAM.
    file
        On the drive; None where nothing is kept there.

    Attributes
    ----------
    lacking
        Segments that are there and came without codes, by number.
    """

    def __init__(self, values: ValueCodes, file: CodeFile | None) -> None:
        self._values, self._file = values, file
        self.lacking: WeakValueDictionary[int, SegmentValues] = WeakValueDictionary()
        # Of those, what has got codes.
        self._completed: WeakValueDictionary[int, SegmentValues] = WeakValueDictionary()
        # By layer and first row.
        self._known: WeakValueDictionary[tuple[int, int], SegmentValues] = WeakValueDictionary()

    @property
    def completes(self) -> bool:
        """Whether segments that came without codes are given some, one by one."""
        return bool(self.lacking) and self._file is not None and not self._values.hold_all

    def numbered(
        self, layer: int, rows: NDArray[np.int64], statistics: ChannelStatistics
    ) -> SegmentValues:
        """Return statistics of a segment's values under the number that codes of it have.

        That is another sequence's where it has the same rows and statistics: caches of one session,
        and forks, find the same codes.

        Parameters
        ----------
        layer, rows
            Whose: int64 row numbers from the segment's first one on; empty while that is open.
        statistics
            Of its values.
        """
        place = (layer, int(rows[0])) if len(rows) else None
        known = None if place is None else self._known.get(place)
        if known is not None and _are_same(known.statistics, statistics):
            return known
        own = self._values.numbered(statistics)
        if place is not None:
            self._known[place] = own
        return own

    def lack(self, own: SegmentValues) -> None:
        """Note that a segment came from a session or a store, with statistics and no codes."""
        if own.number not in self._completed:
            self.lacking[own.number] = own

    def make_room(self, rows: int) -> None:
        """Have memory for codes of row numbers below that, as far as there is some."""
        with suppress(BudgetError):
            self._values.cover(rows)
            self._values.fit()

    def bring(
        self,
        layer: int,
        rows: NDArray[np.int64],
        own: SegmentValues,
        read: Callable[[], NDArray[np.uint8]],
    ) -> None:
        """Keep codes that a session brought of a segment, unless they are here.

        Where tables of these rows do not fit, they come as rows.

        Parameters
        ----------
        layer, rows, own
            As in `keep`.
        read
            Returns the codes, uint8 (rows, row_bytes).
        """
        if own.number not in self.lacking or not len(rows):
            return
        codes = read()
        try:
            # Where DRAM has room for all now, a step's buffers may still take some of it.
            if self._file is not None:
                self._file.write(layer, rows, own.number, codes)
            self._values.offer(layer, rows, np.full(len(rows), own.number), codes)
        except BudgetError:
            return
        self._complete(own)

    def filed(
        self, layer: int, rows: NDArray[np.int64], own: SegmentValues
    ) -> NDArray[np.uint8] | None:
        """Return codes of whole groups as the file has them; None where it has not all.

        Any thread may ask. Parameters as in `keep`.
        """
        return None if self._file is None else self._file.written(layer, rows, own.number)

    def keep(
        self, layer: int, rows: NDArray[np.int64], values: torch.Tensor, own: SegmentValues
    ) -> None:
        """Code values of one segment and keep the codes.

        Parameters
        ----------
        layer, rows
            Whose: int64 row numbers, in the order of positions.
        values
            float16 (tokens, kv_heads, head_dim).
        own
            What there is of the segment.

        Raises
        ------
        BudgetError
            Where tables of these rows do not fit.
        """
        codes = self._values.encode(values, own)
        numbers = np.full(len(rows), own.number)
        if self._file is not None and not self._file.covers(layer, rows, numbers).all():
            self._file.write(layer, rows, own.number, codes)
        self._values.offer(layer, rows, numbers, codes)

    def complete_one(
        self,
        layer: int,
        known: Sequence[SegmentValues],
        stored: Callable[[int], tuple[NDArray[np.int64], torch.Tensor]],
    ) -> None:
        """Keep codes of the first segment that came without any, where DRAM has no room for all.

        One at a time, so that no step waits for many. Where all codes fit in DRAM, each comes there
        once, when its token is wanted. What cannot be read is left to the steps that want it.

        Parameters
        ----------
        layer, known
            Whose segments, in their order.
        stored
            Reads a segment's full groups by its number: row numbers and values as in `keep`.
        """
        if not self.completes:
            return
        for number, own in enumerate(known):
            if own.number in self.lacking:
                self._complete(own)
                try:
                    rows, values = stored(number)
                    if len(rows):
                        self.keep(layer, rows, values, own)
                except HillInferError:
                    return
                return

    def _complete(self, own: SegmentValues) -> None:
        self.lacking.pop(own.number, None)
        self._completed[own.number] = own

    def forget_groups(self, groups: list[int]) -> None:
        """Keep no codes of groups that nobody has any more."""
        self._values.forget_groups(groups)
        if self._file is not None:
            self._file.forget_groups(groups)


def _are_same(one: ChannelStatistics, other: ChannelStatistics) -> bool:
    exponents = np.array_equal(one.exponents, other.exponents)
    return exponents and np.array_equal(one.means, other.means)
