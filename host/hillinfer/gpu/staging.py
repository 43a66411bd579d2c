# SPDX-License-Identifier: Apache-2.0
"""Copies to and from a GPU: the lanes that do them, the page-locked memory they go through."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, round_up
from hillinfer.errors import PageLockError, SetupWarning
from hillinfer.model_shape import ModelShape
from hillinfer.values import format_bytes

# --- The lane that copies ---


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
    """A copy in a stream, and the event that is recorded behind it."""

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


# --- Page-locked memory ---


class StagingKind(StrEnum):
    """What copies to and from a model's device go through."""

    NONE = "none"
    PINNED = "pinned"
    PAGEABLE = "pageable"


class StagingMemory:
    """Page-locked memory, cut into buffers; pageable where the pages cannot be locked.

    `lane` locks the pages; `byte_count` is in whole pages. `kind` says whether it is page-locked; a
    warning says why where it is not.
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


# --- How it is divided ---

# One is filled while another is copied, for the layer at hand and for the one ahead.
ROW_BUFFERS = 4
QUERY_BUFFERS = 4
_QUERY_ITEM_BYTES = 4
_CACHE_LINE = 64


@dataclass(frozen=True)
class StagingPlan:
    """Buffers of rows on their way to a GPU, and of rows and queries on their way from it.

    There are `ROW_BUFFERS` buffers of `buffer_rows` each, and `arriving_rows` new tokens' rows may
    be under way at a time. Bytes are those of one row and one query.
    """

    buffer_rows: int
    arriving_rows: int
    row_bytes: int
    query_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, byte_count: int) -> StagingPlan:
        """Divide the whole pages of so many bytes, or as few as one row in each buffer takes."""
        query = round_up(shape.query_heads * shape.head_dim * _QUERY_ITEM_BYTES, _CACHE_LINE)
        pages = byte_count // PAGE_BYTES * PAGE_BYTES
        rows = (pages - QUERY_BUFFERS * query) // shape.row_bytes
        # One for each layer of a step, where that leaves most of it to the buffers.
        arriving = max(1, min(shape.layers, rows // 4))
        return cls(max(1, (rows - arriving) // ROW_BUFFERS), arriving, shape.row_bytes, query)

    @property
    def byte_count(self) -> int:
        """Bytes of all buffers, in whole pages."""
        rows = ROW_BUFFERS * self.buffer_rows + self.arriving_rows
        return round_up(rows * self.row_bytes + QUERY_BUFFERS * self.query_bytes, PAGE_BYTES)


# --- Its buffers in use ---


class BufferState(Enum):
    """Who may touch a buffer: nobody, the thread that took it, or the lane that copies."""

    FREE = "free"
    HELD = "held"
    LEAVING = "leaving"
    ARRIVING = "arriving"


class StagingRing:
    """Some buffers, each touched by one at a time.

    To the GPU: free, held (a thread fills it), leaving, and free again once the copy's event came.
    From the GPU: free, held, arriving, held again once the event came (a thread reads it), free.
    Any thread may call; every other order is refused, because two users would then see each other's
    bytes. A thread holds one buffer at a time and there is one for each thread, so that whoever
    waits for one gets it. `buffers` is uint8 (count, byte_count).
    """

    def __init__(self, buffers: NDArray[np.uint8]) -> None:
        self.buffers = buffers
        self._states = [BufferState.FREE] * len(buffers)
        self._copies: list[Copy | None] = [None] * len(buffers)
        # Those that leave, in the order in which they went.
        self._leaving: list[int] = []
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self) -> int:
        """Return a buffer to hold, once one is free or the oldest one that leaves has left.

        Raises RuntimeError where the ring is closed, or all buffers arrive and nobody would free
        one.
        """
        while True:
            with self._changed:
                self._refuse_closed()
                if BufferState.FREE in self._states:
                    return self._hold(self._states.index(BufferState.FREE))
                if not self._leaving:
                    if BufferState.HELD not in self._states:
                        raise RuntimeError("all staging buffers arrive: take one back first")
                    self._changed.wait()
                    continue
                oldest = self._leaving[0]
                copy = self._copies[oldest]
            assert copy is not None
            self._wait_left(oldest, copy)

    def acquire_free(self) -> int | None:
        """Return a buffer to hold if one is free now."""
        with self._changed:
            self._refuse_closed()
            if BufferState.FREE not in self._states:
                return None
            return self._hold(self._states.index(BufferState.FREE))

    def leave(self, buffer: int, copy: Copy) -> None:
        """Hand a filled buffer to a copy to the GPU; it is free once that is done."""
        with self._changed:
            self._advance(buffer, BufferState.HELD, BufferState.LEAVING)
            self._copies[buffer] = copy
            self._leaving.append(buffer)
            self._changed.notify_all()

    def arrive(self, buffer: int, copy: Copy) -> None:
        """Hand a buffer to a copy from the GPU that fills it."""
        with self._changed:
            self._advance(buffer, BufferState.HELD, BufferState.ARRIVING)
            self._copies[buffer] = copy

    def arrived(self, buffer: int) -> NDArray[np.uint8]:
        """Wait for what a buffer is filled with and hold it; raises what went wrong.

        After an interrupt while waiting it arrives still, to be waited for again. Returns the
        buffer's bytes, uint8, to be read until it is given back.
        """
        with self._changed:
            if self._states[buffer] is not BufferState.ARRIVING:
                raise RuntimeError(f"buffer {buffer} is {self._states[buffer].value}: none arrives")
            copy = self._copies[buffer]
        assert copy is not None
        try:
            copy.wait()
        except Exception:
            self._hold_arrived(buffer)
            raise
        self._hold_arrived(buffer)
        held: NDArray[np.uint8] = self.buffers[buffer]
        return held

    def give(self, buffer: int) -> None:
        """Free a buffer that is held."""
        with self._changed:
            self._advance(buffer, BufferState.HELD, BufferState.FREE)
            self._changed.notify_all()

    def states(self) -> list[BufferState]:
        """Return every buffer's state; one that leaves is free once somebody looked."""
        with self._changed:
            return list(self._states)

    def close(self) -> None:
        """Wait until no copy touches a buffer and hand none out any more.

        Copies that failed have been told to whoever wanted the bytes.
        """
        with self._changed:
            self._closed = True
            under_way = [copy for copy in self._copies if copy is not None]
            self._changed.notify_all()
        for copy in under_way:
            _wait(copy)
        with self._changed:
            self._leaving.clear()
            self._copies = [None] * len(self.buffers)
            self._states = [BufferState.FREE] * len(self.buffers)

    # --- inside ----------------------------------------------------------------------------

    def _wait_left(self, buffer: int, copy: Copy) -> None:
        # Not under the lock: others free buffers meanwhile.
        _wait(copy)
        with self._changed:
            # Another thread may have waited for the same.
            if self._copies[buffer] is copy:
                self._advance(buffer, BufferState.LEAVING, BufferState.FREE)
                self._copies[buffer] = None
                self._leaving.remove(buffer)
                self._changed.notify_all()

    def _hold_arrived(self, buffer: int) -> None:
        with self._changed:
            self._advance(buffer, BufferState.ARRIVING, BufferState.HELD)
            self._copies[buffer] = None
            self._changed.notify_all()

    def _hold(self, buffer: int) -> int:
        self._advance(buffer, BufferState.FREE, BufferState.HELD)
        return buffer

    def _advance(self, buffer: int, before: BufferState, after: BufferState) -> None:
        if self._states[buffer] is not before:
            raise RuntimeError(
                f"buffer {buffer} is {self._states[buffer].value}: it cannot become {after.value}"
            )
        self._states[buffer] = after

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the staging buffers were given back: open another cache")


def _wait(copy: Copy) -> None:
    """Wait for a copy whose failure is told to whoever wants its bytes."""
    with suppress(Exception):
        copy.wait()
