# SPDX-License-Identifier: Apache-2.0
"""Lanes whose copies are as late as a test wants them, and lanes with a mistake in them.

All copy for real, by the threads of `HostLane`. Memory that nothing was copied into is full of
ones, which are NaN in every type, so that whoever looks too early is found out.
"""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.errors import PageLockError
from hillinfer.gpu.staging import Copy


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


class LateLane(HostLane):
    """Copies as late as a schedule says: seconds before each copy, over and over.

    It knows how many rows it was asked to send, which arrays beside the model somebody still
    holds, and the bytes of locked memory by their address.
    """

    def __init__(self, to_gpu=(0.0,), from_gpu=(0.0,)):
        super().__init__()
        self.rows_sent = 0
        self.targets = weakref.WeakSet()
        self.locked = {}
        self.delays = {"to": list(to_gpu), "from": list(from_gpu)}
        self.copies = {"to": 0, "from": 0}

    def allocate(self, rows, row_bytes):
        target = super().allocate(rows, row_bytes).fill_(0xFF)
        self.targets.add(target)
        return target

    def page_lock(self, memory):
        self.locked[memory.ctypes.data] = memory.nbytes

    def page_unlock(self, memory):
        del self.locked[memory.ctypes.data]

    def to_gpu(self, target, source):
        self.rows_sent += len(source)
        self._to_gpu.submit(self.dawdle, "to")
        return super().to_gpu(target, source)

    def from_gpu(self, target, source):
        target.fill_(0xFF if target.dtype.itemsize == 1 else float("nan"))
        self._from_gpu.submit(self.dawdle, "from")
        return super().from_gpu(target, source)

    def dawdle(self, way):
        turn = self.copies[way]
        self.copies[way] += 1
        time.sleep(self.delays[way][turn % len(self.delays[way])])


class GatedLane(LateLane):
    """Brings nothing back while its gate is closed."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def dawdle(self, way):
        super().dawdle(way)
        assert way == "to" or self.gate.wait(30)


class UnwaitedLane(LateLane):
    """The mistake: compute does not wait for copies to the GPU."""

    def compute_waits(self, copy, target):
        pass


class _Unwaited:
    def wait(self):
        pass


class ForgottenLane(LateLane):
    """The mistake: copies from the GPU say that they are done when they are not."""

    def from_gpu(self, target, source):
        super().from_gpu(target, source)
        return _Unwaited()


class ForgottenRowsLane(LateLane):
    """The mistake: rows of new tokens are taken for arrived when they are not."""

    def from_gpu(self, target, source):
        copy = super().from_gpu(target, source)
        return _Unwaited() if target.dtype.itemsize == 1 else copy


class HastyLane(LateLane):
    """The mistake: the event of a copy to the GPU comes before it has read its buffer."""

    def to_gpu(self, target, source):
        self.last = super().to_gpu(target, source)
        return _Unwaited()

    def compute_waits(self, copy, target):
        # The compute itself sees all copies, so that only their sources can be wrong.
        self.last.wait()


class UnlockableLane(LateLane):
    """A machine that locks no pages."""

    def page_lock(self, memory):
        raise PageLockError(f"{memory.nbytes} bytes: out of memory")


class FailingLane(LateLane):
    """Copies to the GPU, or rows from it, fail while these are set."""

    broken = False
    broken_back = False

    def from_gpu(self, target, source):
        if self.broken_back and target.dtype.itemsize == 1:
            return super().from_gpu(target[:0], source[:, :1].expand(2, 2))
        return super().from_gpu(target, source)

    def to_gpu(self, target, source):
        if self.broken:
            return super().to_gpu(target[:0], source)
        return super().to_gpu(target, source)
