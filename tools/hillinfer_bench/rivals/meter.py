# SPDX-License-Identifier: Apache-2.0
"""Counts what a rival holds and moves."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.byte_size import format_bytes
from hillinfer.errors import BudgetError
from hillinfer.storage.aligned_buffer import aligned_buffer
from hillinfer_bench.rivals.traffic import Traffic


class Meter:
    """Hands out the memory of one rival and counts it; any thread may use it.

    Parameters
    ----------
    budget_bytes
        The most that may be held at once; None for no bound.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._read = self._written = self._held = self._peak = self._steps = 0

    @property
    def free_bytes(self) -> int:
        """What is left of the budget; 0 without one."""
        return max(0, (self._budget or 0) - self._held)

    def buffer(self, byte_count: int) -> NDArray[np.uint8]:
        """Return page-aligned bytes, counted for the rival's life; BudgetError where too many."""
        self.hold(byte_count)
        return aligned_buffer(byte_count)[:byte_count]

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return a zeroed array, counted as in `buffer`."""
        self.hold(prod(shape) * np.dtype(dtype).itemsize)
        return np.zeros(shape, dtype)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of unset values, counted as in `buffer`."""
        self.hold(prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    def hold(self, byte_count: int) -> None:
        """Count bytes held; BudgetError where they do not fit the budget."""
        with self._lock:
            if self._budget is not None and self._held + byte_count > self._budget:
                raise BudgetError(
                    f"a DRAM budget of {format_bytes(self._budget)} is too small for this rival: "
                    f"it needs {format_bytes(self._held + byte_count)} or more; raise budget_bytes"
                )
            self._held += byte_count
            self._peak = max(self._peak, self._held)

    def hold_beyond(self, byte_count: int) -> None:
        """Count bytes held, whether they fit the budget or not."""
        with self._lock:
            self._held += byte_count
            self._peak = max(self._peak, self._held)

    def release(self, byte_count: int) -> None:
        """Count bytes given back."""
        with self._lock:
            self._held -= byte_count

    def count_read(self, byte_count: int) -> None:
        """Count bytes read from the drive."""
        with self._lock:
            self._read += byte_count

    def count_write(self, byte_count: int) -> None:
        """Count bytes written to the drive."""
        with self._lock:
            self._written += byte_count

    def count_step(self) -> None:
        """Count a decode step."""
        self._steps += 1

    def traffic(self) -> Traffic:
        """Return the totals."""
        return Traffic(self._read, self._written, self._held, self._peak, self._steps)
