# SPDX-License-Identifier: Apache-2.0
"""The cold pool: every full group of every layer, on the drive."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.counters import Counters
from hillinfer.errors import ColdPoolError
from hillinfer.model_shape import ModelShape
from hillinfer.storage.aligned_buffer import PAGE_BYTES, aligned_buffer
from hillinfer.storage.cold_file import ColdFile, IOMode, probe_io_mode
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_plan import ReadBatch, plan_reads
from hillinfer_model.kernel_spec import GROUP_TOKENS


@dataclass(frozen=True)
class _PendingWrite:
    groups: NDArray[np.int64]
    written: Future[None]


class ColdStore:
    """Writes groups of rows once and reads rows in batches, one file per layer.

    Row r of a layer is row r % 64 of group r // 64.

    Parameters
    ----------
    directory
        Where the files lie.
    shape
        The model's.
    read_buffer_bytes
        Size of the one buffer that reads go through.
    io_threads
        Reads in flight.
    counters
        Where bytes and waits are counted.
    calls
        How the drive is reached; the operating system itself where None.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        read_buffer_bytes: int,
        io_threads: int,
        counters: Counters,
        calls: DriveCalls | None = None,
    ) -> None:
        self.io_mode: IOMode = probe_io_mode(directory, calls)
        with ExitStack() as opened:
            self._files: list[ColdFile] = []
            for layer in range(shape.layers):
                label = f"rows of layer {layer}"
                self._files.append(ColdFile(directory, self.io_mode, label, calls))
                opened.callback(self._files[-1].close)
            opened.pop_all()
        self._row_bytes = shape.row_bytes
        self._group_bytes = GROUP_TOKENS * shape.row_bytes
        self._buffer = aligned_buffer(max(read_buffer_bytes, shape.row_bytes + 2 * PAGE_BYTES))
        self._readers = ThreadPoolExecutor(io_threads, thread_name_prefix="hillinfer-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-write")
        self._pending: list[list[_PendingWrite]] = [[] for _ in range(shape.layers)]
        self._failure: Exception | None = None
        self._io_threads = io_threads
        self._counters = counters

    def write_groups(
        self,
        layer: int,
        groups: NDArray[np.int64],
        rows: NDArray[np.uint8],
        done: Callable[[], None],
    ) -> None:
        """Queue full groups to be written; the caller computes on while they are.

        Parameters
        ----------
        layer
            Which file.
        groups
            int64 group numbers, one per 64 rows.
        rows
            Page-aligned uint8 of shape (64 · groups, row_bytes), left alone until `done`.
        done
            Called from the writing thread when `rows` may be used again.
        """
        data = rows.reshape(-1).data
        self._counters.cold_write_bytes += len(data)

        def write() -> None:
            try:
                breaks = np.flatnonzero(np.diff(groups) != 1) + 1
                for begin, end in pairwise([0, *breaks.tolist(), len(groups)]):
                    self._files[layer].write(
                        data[begin * self._group_bytes : end * self._group_bytes],
                        int(groups[begin]) * self._group_bytes,
                    )
            except Exception as error:
                self._failure = error
            finally:
                done()

        self._pending[layer].append(_PendingWrite(groups, self._writer.submit(write)))

    def settle(self, layer: int, groups: NDArray[np.int64]) -> None:
        """Wait until what is queued of some groups is on the drive; raise what went wrong.

        Writes of other groups go on, so that spilling a chunk overlaps attending to those before.
        """
        started = time.perf_counter()
        for pending in self._pending[layer]:
            if not pending.written.done() and np.isin(groups, pending.groups).any():
                pending.written.result()
        self._counters.drive_wait_seconds += time.perf_counter() - started
        self._raise_failure()

    def check(self) -> None:
        """Raise what went wrong with any write that has ended, ever since.

        Rows that a failed write lost would read as zeros once a later write had made the file
        longer, so a store that failed once stays failed.
        """
        for layer, pending in enumerate(self._pending):
            self._pending[layer] = [one for one in pending if not one.written.done()]
        self._raise_failure()

    def read_rows(
        self,
        layer: int,
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> None:
        """Read rows of a layer in one batch.

        Parameters
        ----------
        layer
            Which file.
        rows
            int64 row numbers, each once.
        out
            uint8 of shape (any, row_bytes).
        places
            int64, where in `out` each row goes.
        """
        if not len(rows):
            return
        self.settle(layer, rows // GROUP_TOKENS)
        started = time.perf_counter()
        for batch in plan_reads(rows, self._row_bytes, len(self._buffer)):
            self._read(layer, batch)
            # Rows start at multiples of 64 bytes, so a view of all such places has them as rows.
            at_64 = np.lib.stride_tricks.as_strided(
                self._buffer,
                shape=((len(self._buffer) - self._row_bytes) // 64 + 1, self._row_bytes),
                strides=(64, 1),
                writeable=False,
            )
            out[places[batch.wanted]] = at_64[batch.row_offsets // 64]
            self._counters.cold_reads += len(batch.byte_counts)
            self._counters.cold_read_bytes += int(batch.byte_counts.sum())
        self._counters.cold_useful_bytes += len(rows) * self._row_bytes
        self._counters.drive_wait_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Stop the threads and give the drive's space back."""
        self._writer.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        for file in self._files:
            file.close()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, ColdPoolError):
            raise ColdPoolError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise self._failure

    def _read(self, layer: int, batch: ReadBatch) -> None:
        view = self._buffer.data
        file = self._files[layer]

        def read_share(share: int) -> None:
            for i in range(share, len(batch.file_offsets), self._io_threads):
                at, count = int(batch.buffer_offsets[i]), int(batch.byte_counts[i])
                file.read(view[at : at + count], int(batch.file_offsets[i]))

        if len(batch.file_offsets) == 1:
            read_share(0)
            return
        shares = min(self._io_threads, len(batch.file_offsets))
        reads = [self._readers.submit(read_share, share) for share in range(shares)]
        # All of them, before any error: a read still under way would fill the buffer of the next.
        wait(reads)
        for read in reads:
            read.result()
