# SPDX-License-Identifier: Apache-2.0
"""A rival that leaves all to the kernel's swap."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, ColdFile, IOMode, round_up
from hillinfer.errors import BudgetError, ColdPoolError
from hillinfer_bench.rivals.block_attention import BlockAttention, Part, whole
from hillinfer_bench.rivals.rival import Rival, RivalSetup
from hillinfer_model.kernel_spec import GROUP_TOKENS

_LEAST_WINDOWS = 4
_SYSTEM = ctypes.CDLL(None, use_errno=True)
_TRIES, _PAUSE = 50, 0.01


class FullSwap(Rival):
    """A file on the drive, mapped, of which windows beyond M0 are given back to the system.

    Not a swap device: a stand-in that needs no rights. Memory is paged in by the kernel where it is
    touched, and what was touched longest ago is paged out, as a system under a memory limit does;
    full windows are written at once, the one being filled only where nothing else can give way.

    Parameters
    ----------
    setup
        See `Rival`.

    Raises
    ------
    ColdPoolError
        Where pages of the directory's files cannot be given back (file systems in memory).

    Attributes
    ----------
    file, rows
        The file, and its rows where they are mapped, uint8 (layers, batch, tokens, row_bytes).
    """

    # The kernel pages in and out through the page cache, which windows are given back from.
    direct: ClassVar[bool] = False

    def __init__(self, setup: RivalSetup) -> None:
        super().__init__(setup)
        self.row_bytes = setup.shape.row_bytes
        self.attention = BlockAttention(setup.shape, self.layout, setup.block_rows)
        group_bytes = GROUP_TOKENS * self.row_bytes
        wanted = min(setup.window_bytes, setup.budget_bytes // 16) // group_bytes
        self.window_tokens = max(1, wanted) * GROUP_TOKENS
        self.window_bytes = self.window_tokens * self.row_bytes
        self.windows = setup.budget_bytes // self.window_bytes
        if self.windows < _LEAST_WINDOWS:
            raise BudgetError(
                f"a DRAM budget of {setup.budget_bytes} bytes is too small for this rival: "
                f"raise budget_bytes to {_LEAST_WINDOWS * self.window_bytes}"
            )
        region = round_up(setup.context, self.window_tokens)
        self.file = ColdFile(setup.cold_dir, IOMode.BUFFERED, "mapped rows")
        try:
            size = setup.units * region * self.row_bytes
            os.ftruncate(self.file.descriptor, size)
            self._map = mmap.mmap(self.file.descriptor, size)
            # Windows are read as a whole when they are first used; more would not be counted.
            self._map.madvise(mmap.MADV_RANDOM)
            self._check_paging()
        except OSError as error:
            self.file.close()
            raise ColdPoolError(
                f"{setup.cold_dir}: no file can be mapped there: {error}"
            ) from error
        except BaseException:
            self.file.close()
            raise
        shape = setup.shape.layers, setup.batch, region, self.row_bytes
        self.rows: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(shape)
        # Of each window in memory the pages that the drive does not have; oldest use first.
        self._dirty: OrderedDict[int, set[int]] = OrderedDict()
        self._on_drive: dict[int, set[int]] = {}

    def attended_token_bytes(self) -> float:
        """Return those of whole rows; see `Rival`."""
        return float(self.setup.shape.token_bytes)

    def describe(self) -> str:
        """Return that this is a mapped file, and its windows."""
        return (
            f"a mapped file instead of swap, {self.windows} windows of "
            f"{self.window_tokens} tokens in DRAM"
        )

    def fill(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows where they are mapped; see `Rival`."""
        begin = self.grow(layer, row, keys, values)
        end, at = begin + keys.shape[1], begin
        while at < end:
            window = self._touch(layer, row, at)
            stop = min(end, (at // self.window_tokens + 1) * self.window_tokens)
            new = slice(at - begin, stop - begin)
            self.layout.pack(keys[:, new], values[:, new], self.rows[layer, row, at:stop])
            first = self._byte(layer, row, at)
            pages = range(first // PAGE_BYTES, -(-self._byte(layer, row, stop) // PAGE_BYTES))
            self._dirty[window].update(pages)
            if stop % self.window_tokens == 0:
                self._write(window)
            at = stop

    def append(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one row where it is mapped; see `Rival`."""
        self.fill(layer, row, keys, values)

    def attend(self, layer: int, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to everything; see `Rival`."""
        return self.attention.attend(query, self._batches(layer, row), scaling)

    def close(self) -> None:
        """Give memory and space back; see `Rival`."""
        self.meter.release(self.meter.traffic().dram_bytes)
        self.rows = np.empty((0, 0, 0, 0), np.uint8)
        self._dirty.clear()
        if not self._map.closed:
            self._map.close()
        self.file.close()

    def _batches(self, layer: int, row: int) -> Iterator[list[Part]]:
        length = self.lengths[layer][row]
        for first in range(0, length, self.window_tokens):
            last = min(first + self.window_tokens, length)
            self._touch(layer, row, first)
            if last < length:
                # The kernel reads the next window while attention works on this one.
                self._touch(layer, row, last)
            yield [whole(self.rows[layer, row, first:last])]

    def _byte(self, layer: int, row: int, token: int) -> int:
        region = int(self.rows.shape[2])
        return ((layer * self.setup.batch + row) * region + token) * self.row_bytes

    def _touch(self, layer: int, row: int, token: int) -> int:
        """Note that a token's window is used; have it read where it was given back."""
        window = self._byte(layer, row, token) // self.window_bytes
        if window in self._dirty:
            self._dirty.move_to_end(window)
            return window
        if len(self._dirty) == self.windows:
            self._page_out()
        self._dirty[window] = set()
        self.meter.hold(self.window_bytes)
        on_drive = self._on_drive.get(window)
        if on_drive:
            self._map.madvise(mmap.MADV_WILLNEED, window * self.window_bytes, self.window_bytes)
            # The system makes more of them, if anything.
            self.meter.count_reads(1, len(on_drive) * PAGE_BYTES)
        return window

    def _page_out(self) -> None:
        """Give back the window used longest ago, but one that must be written only if all must."""
        oldest = islice(self._dirty, len(self._dirty) - 1)
        window = next((one for one in oldest if not self._dirty[one]), next(iter(self._dirty)))
        self._write(window)
        del self._dirty[window]
        self._give_back(window * self.window_bytes, self.window_bytes)
        self.meter.release(self.window_bytes)

    def _write(self, window: int) -> None:
        """Write what the drive does not have of a window; it stays in memory."""
        dirty = self._dirty[window]
        if dirty:
            first, last = min(dirty), max(dirty) + 1
            self._map.flush(first * PAGE_BYTES, (last - first) * PAGE_BYTES)
            self.meter.count_write(len(dirty) * PAGE_BYTES)
            self._on_drive.setdefault(window, set()).update(dirty)
            self._dirty[window] = set()

    def _give_back(self, begin: int, count: int) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, begin, count)
        os.posix_fadvise(self.file.descriptor, begin, count, os.POSIX_FADV_DONTNEED)

    def _check_paging(self) -> None:
        """Page one page out and see whether it is gone."""
        self._map[:1] = b"\0"
        self._map.flush(0, PAGE_BYTES)
        for _ in range(_TRIES):
            self._give_back(0, PAGE_BYTES)
            if not pages_in_memory(np.frombuffer(self._map, np.uint8, PAGE_BYTES))[0]:
                return
            # The kernel may still hold a page that it just wrote.
            time.sleep(_PAUSE)
        raise ColdPoolError(
            f"pages of files in {self.setup.cold_dir} stay in memory: full-swap would swap "
            "nothing; choose a cold_dir on a drive"
        )


def pages_in_memory(mapped: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each page of a mapped file whether it is in memory; page-aligned uint8."""
    found = np.zeros(-(-mapped.nbytes // PAGE_BYTES), np.uint8)
    address, count = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
    if _SYSTEM.mincore(address, count, ctypes.c_void_p(found.ctypes.data)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return (found & 1).astype(bool)
