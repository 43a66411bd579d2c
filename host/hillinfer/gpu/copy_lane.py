# SPDX-License-Identifier: Apache-2.0
"""Where copies between host memory and a model's GPU run, beside everything else."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Copy(Protocol):
    """A copy that was asked for and may not have happened yet."""

    def wait(self) -> None:
        """Wait, on the host, until it is done; raises what went wrong."""
        ...


class CopyLane(Protocol):
    """Copies beside the threads of the host and the compute of a model (HillInfer, section 4.3).

    Copies of one direction are done in the order they were asked for; the two directions do not
    wait for each other. Any thread may ask. Whoever asks for a copy neither touches its source nor
    its target until the copy was waited for.
    """

    def allocate(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Return uint8 (rows, row_bytes) beside the model, for copies of this lane to fill.

        The compute that reads it is announced by `compute_waits`; it may then be dropped at any
        time.
        """
        ...

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy host memory into what `allocate` returned, whatever the model is computing."""
        ...

    def from_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy what the model computes into host memory, once it has computed it.

        `source` is the result of work that the calling thread asked for before.
        """
        ...

    def compute_waits(self, copy: Copy, target: torch.Tensor) -> None:
        """Let what the calling thread asks the model for from here on see a copy to the GPU."""
        ...

    def page_lock(self, memory: NDArray[np.uint8]) -> None:
        """Lock the pages of whole host memory, so that the GPU reads and writes them by itself.

        Raises
        ------
        PageLockError
            Where they cannot be.
        """
        ...

    def page_unlock(self, memory: NDArray[np.uint8]) -> None:
        """Undo `page_lock`; no copy of this memory is under way."""
        ...

    def close(self) -> None:
        """Wait for all copies and end."""
        ...
