# SPDX-License-Identifier: Apache-2.0
"""Copies by threads of the host, in the order and the manner a GPU would do them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.gpu.copy_lane import Copy


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy by a thread.

    Parameters
    ----------
    done
        Has a result once the bytes are there.
    """

    done: Future[None]

    def wait(self) -> None:
        """Wait until it is done; raises what went wrong."""
        self.done.result()


class HostLane:
    """A copy lane for a model on the processor: a thread for each direction; see `CopyLane`.

    Nothing is gained by it where model and rows share one memory. It is how the order of copies is
    executed, and tested, without a GPU: copies are as late as the threads are.
    """

    def __init__(self) -> None:
        self._to_gpu = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-to-gpu")
        self._from_gpu = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-from-gpu")

    def allocate(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Return uint8 (rows, row_bytes); see `CopyLane`."""
        return torch.empty((rows, row_bytes), dtype=torch.uint8)

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy in the thread of this direction; see `CopyLane`."""
        return HostCopy(self._to_gpu.submit(self._copy, target, source))

    def from_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy in the thread of this direction; see `CopyLane`.

        On a processor the calling thread's work is done when it asks.
        """
        return HostCopy(self._from_gpu.submit(self._copy, target, source))

    def compute_waits(self, copy: Copy, target: torch.Tensor) -> None:
        """Wait: a processor computes in the calling thread."""
        copy.wait()

    def page_lock(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing: no other chip reads this memory."""

    def page_unlock(self, memory: NDArray[np.uint8]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Wait for all copies and end both threads."""
        self._to_gpu.shutdown()
        self._from_gpu.shutdown()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # The mode belongs to a thread, and what was made in it is not written to outside.
        with torch.inference_mode():
            target.copy_(source)
