# SPDX-License-Identifier: Apache-2.0
"""Copies by a CUDA GPU's own copy engines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import PageLockError
from hillinfer.gpu.copy_lane import Copy


@dataclass(frozen=True, eq=False)
class CudaCopy:
    """A copy in a stream.

    Parameters
    ----------
    event
        Recorded behind it.
    """

    event: torch.cuda.Event

    def wait(self) -> None:
        """Wait, asleep, until the copy is done."""
        self.event.synchronize()


class CudaLane:
    """A stream beside the model's for each direction, with an event per copy; see `CopyLane`.

    Two streams, because what comes back waits for the model and what goes there must not.

    Parameters
    ----------
    device
        The model's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_gpu = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._from_gpu = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Return uint8 (rows, row_bytes) on the GPU; see `CopyLane`.

        Taken from what the copying stream freed: memory that the model freed may still be read by
        what it has not computed yet, and waiting for that would end all overlap.
        """
        with torch.cuda.stream(self._to_gpu):
            return torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device)

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy in the stream of this direction; see `CopyLane`."""
        return self._copy(self._to_gpu, target, source)

    def from_gpu(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy behind what the calling thread has asked the model for; see `CopyLane`."""
        self._from_gpu.wait_stream(torch.cuda.current_stream(self._device))
        # Its memory is not given to others before this stream has read it.
        source.record_stream(self._from_gpu)
        return self._copy(self._from_gpu, target, source)

    def compute_waits(self, copy: Copy, target: torch.Tensor) -> None:
        """Let the calling thread's stream wait for a copy; the host goes on."""
        assert isinstance(copy, CudaCopy), "copies are waited for in the lane that does them"
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(copy.event)
        target.record_stream(compute)

    def page_lock(self, memory: NDArray[np.uint8]) -> None:
        """Register memory with the driver; see `CopyLane`.

        torch's own pinned memory is rounded up to powers of two and kept when it is freed, which
        M0 could not count.
        """
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        if code:
            self._forget_error()
            raise PageLockError(f"cudaHostRegister says {_said(code)}")

    def page_unlock(self, memory: NDArray[np.uint8]) -> None:
        """Take memory back from the driver."""
        with torch.cuda.device(self._device):
            code = int(_runtime().cudaHostUnregister(memory.ctypes.data))
        if code:
            self._forget_error()
            raise PageLockError(f"cudaHostUnregister says {_said(code)}")

    def close(self) -> None:
        """Wait for all copies."""
        self._to_gpu.synchronize()
        self._from_gpu.synchronize()

    def _copy(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> CudaCopy:
        # A thread that waits sleeps: there may be no other core for scoring.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return CudaCopy(event)

    def _forget_error(self) -> None:
        """Let a kernel fail that nobody needs: CUDA keeps an error for the next one launched."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _said(code: int) -> str:
    return f"{_runtime().cudaGetErrorString(_runtime().cudaError(code))!r} (error {code})"
