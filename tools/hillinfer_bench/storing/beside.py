# SPDX-License-Identifier: Apache-2.0
"""Measures what plain reads of a stored prefix cost a pass beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

import numpy as np

from hillinfer.drive.calls import Reads
from hillinfer.store.prefix import StoredPrefix
from hillinfer.store.store import Store
from hillinfer.system.kept_memory import BLOCK_BYTES, KeptMemory

# As a stream reads beside a pass: in long calls, few in flight, into memory that is used again.
_READ_BYTES, _THREADS = 4 << 20, 2


class ReadsBeside:
    """Reads the rows of a prefix behind its first layer, and does nothing with them.

    Its threads take no lock of Python's and look at no byte. So a pass beside it has to share the
    machine with interrupts, the kernel's part of reading and the drive's way to memory, and with
    nothing that a store could leave out.

    Parameters
    ----------
    store, found
        Where the prefix lies; both stay open.
    """

    def __init__(self, store: Store, found: StoredPrefix) -> None:
        memory = KeptMemory(0).taken(BLOCK_BYTES)
        memory[:] = 0
        shape, at = found.shape, 0
        size = (shape.layers - 1) * shape.object_bytes
        self._work: list[Callable[[], None]] = []
        for drive, file in enumerate(store.files):
            parts = []
            for chunk in found.chunks:
                if chunk.record.span.drive == drive:
                    start = chunk.record.span.offset + shape.rows_at(1)
                    parts.append(Reads.in_pieces(start, size, _READ_BYTES))
            if not parts:
                continue
            offsets = np.concatenate([one.file_offsets for one in parts])
            counts = np.concatenate([one.byte_counts for one in parts])
            places = (at + np.arange(len(offsets))) * _READ_BYTES % BLOCK_BYTES
            at += len(offsets)
            reads = Reads(offsets, places, counts)
            self._work.append(partial(file.read_many, reads, memory, _THREADS))
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ReadsBeside:
        self._threads = [threading.Thread(target=work) for work in self._work]
        for one in self._threads:
            one.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._threads:
            one.join()
