# SPDX-License-Identifier: Apache-2.0
"""Reads shared out among threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.reads import Reads
from hillinfer.storage.stored_base import ReadFile


class ThreadEngine:
    """A `ReadEngine` of ordinary reads, one at a time in each of several threads.

    Parameters
    ----------
    threads
        Reads in flight.
    """

    name = "threads"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hillinfer-read")

    def read(self, file: ReadFile, buffer: NDArray[np.uint8], reads: Reads) -> None:
        """Make all reads; see `ReadEngine`."""
        view = buffer.data

        def read_share(share: int) -> None:
            for i in range(share, len(reads), self._threads):
                at, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
                file.read(view[at : at + count], int(reads.file_offsets[i]))

        if len(reads) <= 1:
            read_share(0)
            return
        shares = min(self._threads, len(reads))
        running = [self._pool.submit(read_share, share) for share in range(shares)]
        # All of them, before any error or interrupt goes on: a read still under way would fill the
        # buffer of the next.
        try:
            wait(running)
        except BaseException:
            wait(running)
            raise
        for one in running:
            one.result()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)
