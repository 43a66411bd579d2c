# SPDX-License-Identifier: Apache-2.0
"""Copies between host memory and a model's GPU, beside everything else."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import PageLockError

# --- The interface ---


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

        Raises PageLockError where they cannot be.
        """
        ...

    def page_unlock(self, memory: NDArray[np.uint8]) -> None:
        """Undo `page_lock`; no copy of this memory is under way."""
        ...

    def close(self) -> None:
        """Wait for all copies and end."""
        ...


# --- CUDA's copy engines ---


@dataclass(frozen=True, eq=False)
class CudaCopy:
    """A copy in a stream.

    The event is recorded behind it.
    """

    event: torch.cuda.Event

    def wait(self) -> None:
        """Wait, asleep, until the copy is done."""
        self.event.synchronize()


class CudaLane:
    """A stream beside the model's for each direction, with an event per copy; see `CopyLane`.

    Two streams, because what comes back waits for the model and what goes there must not.
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


# --- Choosing a lane ---


def lane_of(devices: Collection[torch.device]) -> CopyLane | None:
    """Return a lane to the one CUDA GPU that a whole model is on, or None.

    On a processor rows are attended to where they lie. Other accelerators, and models in parts on
    several devices, get plain copies. `devices` are those of the model's parameters, each once.
    """
    if len(devices) != 1:
        return None
    (device,) = devices
    return CudaLane(device) if device.type == "cuda" else None
