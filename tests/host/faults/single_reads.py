# SPDX-License-Identifier: Apache-2.0
"""A drive whose reads are looked at one by one, so that a test can spoil any of them."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls, Reads


class SingleReads(DriveCalls):
    """Calls `read_done` for each of many reads; an OSError is one that the kernel told."""

    def read_done(self, descriptor: int, into: memoryview, offset: int, result: int) -> int:
        """Return how many bytes one read of many brought, by what the kernel said of it."""
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def reads_done(
        self,
        descriptor: int,
        buffer: NDArray[np.uint8],
        reads: Reads,
        done: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Ask `read_done` of each."""
        came = np.empty(len(done), np.int64)
        view = buffer.data
        for at, (i, result) in enumerate(zip(done.tolist(), results.tolist(), strict=True)):
            start, count = int(reads.buffer_offsets[i]), int(reads.byte_counts[i])
            into = view[start : start + count]
            try:
                came[at] = self.read_done(descriptor, into, int(reads.file_offsets[i]), result)
            except OSError as error:
                came[at] = -(error.errno or 1)
        return came
