# SPDX-License-Identifier: Apache-2.0
"""Memory that rows land in before the layer that wants them begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hillinfer.storage.aligned_buffer import aligned_buffer


class BlockState(Enum):
    """Where a block is in its life: free, filling, ready, in use, and free again."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


_BEFORE = {
    BlockState.FILLING: BlockState.FREE,
    BlockState.READY: BlockState.FILLING,
    BlockState.IN_USE: BlockState.READY,
}


class LandingArea:
    """Blocks of rows, each handed from the thread that reads to the one that attends.

    Any thread may call; a step of a block's life that does not follow from the one before is
    refused, because two users would then see each other's rows.

    Parameters
    ----------
    blocks
        How many.
    block_rows, row_bytes
        Size of each.

    Attributes
    ----------
    blocks, block_rows
        As given.
    rows
        uint8 of shape (blocks · block_rows, row_bytes): all blocks, one behind the other.
    """

    def __init__(self, blocks: int, block_rows: int, row_bytes: int) -> None:
        self.blocks = blocks
        self.block_rows = block_rows
        size = blocks * block_rows * row_bytes
        self.rows: NDArray[np.uint8] = aligned_buffer(size)[:size].reshape(-1, row_bytes)
        self._states = [BlockState.FREE] * blocks
        self._changed = threading.Condition()

    def take(self, rows: int) -> list[int]:
        """Return blocks to fill for so many rows: fewer where not enough are free."""
        wanted = -(-rows // self.block_rows)
        with self._changed:
            free = [i for i, state in enumerate(self._states) if state is BlockState.FREE]
            taken = free[:wanted]
            for block in taken:
                self._states[block] = BlockState.FILLING
        return taken

    def wait_for_room(self, stop: Callable[[], bool]) -> None:
        """Wait until a block is free or `stop` returns True, which is asked after every `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: stop() or BlockState.FREE in self._states)

    def wake(self) -> None:
        """Let those who wait for room look again."""
        with self._changed:
            self._changed.notify_all()

    def places(self, blocks: list[int], rows: int) -> NDArray[np.int64]:
        """Return where so many rows go in `rows`, int64, the blocks filled in the given order."""
        inside = np.arange(self.block_rows)
        every = (np.asarray(blocks, np.int64)[:, None] * self.block_rows + inside).reshape(-1)
        return every[:rows]

    def ready(self, block: int) -> None:
        """Note that a block is filled."""
        self._advance(block, BlockState.READY)

    def use(self, block: int) -> None:
        """Note that attention or promotion begins to look at a block."""
        self._advance(block, BlockState.IN_USE)

    def give(self, block: int) -> None:
        """Free a block, in use or not.

        Raises
        ------
        RuntimeError
            Where it is free, or still being filled.
        """
        with self._changed:
            if self._states[block] in (BlockState.FREE, BlockState.FILLING):
                raise RuntimeError(f"block {block} is {self._states[block].value}: not to be freed")
            self._states[block] = BlockState.FREE
            self._changed.notify_all()

    def abandon(self, block: int) -> None:
        """Free a block whose filling failed.

        Raises
        ------
        RuntimeError
            Where it was not being filled.
        """
        with self._changed:
            if self._states[block] is not BlockState.FILLING:
                raise RuntimeError(f"block {block} is {self._states[block].value}: not filling")
            self._states[block] = BlockState.FREE
            self._changed.notify_all()

    def states(self) -> list[BlockState]:
        """Return every block's state."""
        with self._changed:
            return list(self._states)

    def _advance(self, block: int, state: BlockState) -> None:
        with self._changed:
            if self._states[block] is not _BEFORE[state]:
                raise RuntimeError(
                    f"block {block} is {self._states[block].value}: it cannot become {state.value}"
                )
            self._states[block] = state
