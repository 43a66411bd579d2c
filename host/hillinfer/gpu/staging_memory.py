# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU copies from and to by itself."""

from __future__ import annotations

import warnings
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hillinfer.byte_size import format_bytes
from hillinfer.errors import PageLockError, SetupWarning
from hillinfer.gpu.copy_lane import CopyLane
from hillinfer.storage.aligned_buffer import aligned_buffer


class StagingKind(StrEnum):
    """What copies to and from a model's device go through."""

    NONE = "none"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class StagingMemory:
    """Page-locked memory, cut into buffers; pageable where the pages cannot be locked.

    Parameters
    ----------
    lane
        Locks the pages.
    byte_count
        How much, in whole pages.

    Attributes
    ----------
    kind
        Whether it is page-locked; a warning says why where it is not.
    """

    def __init__(self, lane: CopyLane, byte_count: int) -> None:
        self._lane = lane
        self._memory: NDArray[np.uint8] = aligned_buffer(byte_count)
        self._cut = 0
        self.byte_count = byte_count
        try:
            lane.page_lock(self._memory)
            self.kind = StagingKind.PINNED
        except PageLockError as error:
            self.kind = StagingKind.PAGEABLE
            warnings.warn(
                f"{format_bytes(byte_count)} of host memory could not be page-locked for the GPU "
                f"({error}): copies go through pageable memory, slower and with the host waiting "
                "for them, and with the same results; free memory, raise the limit on locked "
                "memory (ulimit -l), or lower --block-rows",
                SetupWarning,
                stacklevel=2,
            )

    def cut(self, count: int, byte_count: int) -> NDArray[np.uint8]:
        """Return the next `count` buffers of so many bytes each, uint8 (count, byte_count)."""
        start, self._cut = self._cut, self._cut + count * byte_count
        if self._cut > len(self._memory):
            raise ValueError(f"{self._cut} bytes of {len(self._memory)} were to be cut")
        return self._memory[start : self._cut].reshape(count, byte_count)

    def close(self) -> None:
        """Unlock the pages; no copy is under way."""
        if self.kind is StagingKind.PINNED:
            self._lane.page_unlock(self._memory)
            self.kind = StagingKind.NONE
