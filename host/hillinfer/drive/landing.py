# SPDX-License-Identifier: Apache-2.0
"""Lands rows: reads them from files to their places, or to blocks of a landing area."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer
from hillinfer.native.selected import Coming
from hillinfer.native.structures import Landing, address_of
from hillinfer.trace.recorder import ReadCost
from hillinfer_model.kernel_spec import GROUP_TOKENS

# The native library, which plans reads, has the same two numbers: rows closer than the first are
# read together, and no read is longer than the second.
JOIN_GAP_BYTES = 8 * 1024
MAX_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class Seals:
    """What opens sealed pages while they land, as the native library has it (`PageSeal`).

    Parameters
    ----------
    address, count
        Where the table lies, and its lines.
    of_groups
        1 where each group of 64 rows has a line, by its number; 0 where the file has one.
    kept
        What must live as long.
    """

    address: int
    count: int
    of_groups: int
    kept: object


@dataclass(frozen=True)
class FileRows:
    """Rows of a file, and where each of them goes.

    Parameters
    ----------
    rows
        int64 row numbers, in any order, each once; row r starts at r · row_bytes of the file, or
        where `starts` says.
    out
        uint8 of shape (any, row_bytes), contiguous, row_bytes a multiple of 64.
    places
        int64, where in `out` each row goes.
    buffer
        Page-aligned uint8 that reads go through, at least one row and two pages, where rows do not
        lie in pages; nobody else uses it meanwhile.
    sums
        uint32, the checksum of each row of the file as far as rows are wanted; None where nobody
        looks.
    coming
        Who attends to the rows as they come; None where nobody does.
    starts
        int64, contiguous: the byte of the file that each group of 64 rows starts at, as far as
        rows are wanted; None where they lie one behind the other.
    seals
        What opens the pages that they lie in; None where these are plain.
    unit_bytes
        Reads begin and end at multiples of it in the file and the buffer, as direct I/O asks for;
        a power of two, at most a page. Sealed pages are read whole.
    """

    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    places: NDArray[np.int64]
    buffer: NDArray[np.uint8]
    sums: NDArray[np.uint32] | None = None
    coming: Coming | None = None
    starts: NDArray[np.int64] | None = None
    seals: Seals | None = None
    unit_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        if self.out.ndim != 2 or not self.out.flags.c_contiguous or self.out.shape[1] % 64:
            raise ValueError(f"rows of shape {self.out.shape} must be contiguous multiples of 64")
        if len(self.places) != len(self.rows):
            raise ValueError(f"{len(self.rows)} rows do not go to {len(self.places)} places")
        if len(self.buffer) < self.row_bytes + 2 * PAGE_BYTES and not self.lie_in_pages:
            raise ValueError(f"a buffer of {len(self.buffer)} bytes does not hold a row's pages")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.out.shape[1])

    @property
    def lie_in_pages(self) -> bool:
        """Whether they can be read to their places without a buffer in between.

        Reads of rows that are longer than a gap join nothing but neighbours either way.
        """
        return (
            self.row_bytes > JOIN_GAP_BYTES
            and self.row_bytes % PAGE_BYTES == 0
            and self.out.ctypes.data % PAGE_BYTES == 0
        )


@dataclass(frozen=True)
class Landed:
    """What it took to bring rows.

    Parameters
    ----------
    cost
        Reads, and the bytes they brought.
    wrong
        The first of the rows, by its place among those wanted, whose checksum is another or whose
        page does not open; None where none is, or nobody looks.
    """

    cost: ReadCost
    wrong: int | None


class LandingTable:
    """Rows on their way, as the native library has them.

    Parameters
    ----------
    wanted
        Which, and where they go.

    Attributes
    ----------
    table
        What the library reads and writes; its arrays live as long as this.
    """

    def __init__(self, wanted: FileRows) -> None:
        lands_alone = wanted.lie_in_pages
        # Where reads bring their bytes.
        self.memory = wanted.out.reshape(-1) if lands_alone else wanted.buffer
        count, size = len(wanted.rows), np.dtype(np.int64).itemsize
        # As many reads as a batch has at most; memory that nobody touches takes none.
        most = count + len(self.memory) // MAX_READ_BYTES + 1
        # To ask where each array lies takes longer than to copy them to one.
        own = np.empty(2 * count + 3 * most, np.int64)
        own[:count], own[count : 2 * count] = wanted.rows, wanted.places
        self._missing = own[2 * count :].reshape(3, most)
        coming = wanted.coming
        numbers = None if coming is None else np.ascontiguousarray(coming.numbers, np.int64)
        self._kept = (wanted, own, numbers)
        rows, line = address_of(own), most * size
        offsets = rows + 2 * count * size
        self.table = Landing(
            rows,
            rows + count * size,
            count,
            wanted.row_bytes,
            address_of(wanted.out),
            len(wanted.out),
            None if lands_alone else address_of(wanted.buffer),
            len(wanted.buffer),
            None if wanted.sums is None else address_of(wanted.sums),
            0 if wanted.sums is None else len(wanted.sums),
            None if wanted.starts is None else address_of(wanted.starts),
            0 if wanted.starts is None else len(wanted.starts),
            wrong=-1,
            missing_offsets=offsets,
            missing_addresses=offsets + line,
            missing_counts=offsets + 2 * line,
            attending=None if coming is None else ctypes.addressof(coming.run.table),
            numbers=None if numbers is None else address_of(numbers),
            seals=None if wanted.seals is None else wanted.seals.address,
            seal_count=0 if wanted.seals is None else wanted.seals.count,
            seals_groups=0 if wanted.seals is None else wanted.seals.of_groups,
            unit_bytes=wanted.unit_bytes,
        )

    @property
    def landed(self) -> Landed:
        """What it took so far."""
        table = self.table
        cost = ReadCost(table.reads, table.byte_count)
        return Landed(cost, None if table.wrong < 0 else table.wrong)

    def missing(self) -> Iterator[tuple[memoryview, int]]:
        """Yield the memory and the file offset of each read that did not come whole.

        Once all were made otherwise, the next call of the library goes on behind them.
        """
        view, start = self.memory.data, self.memory.ctypes.data
        for offset, address, count in self._missing[:, : self.table.missing].T.tolist():
            yield view[address - start : address - start + count], offset
        self.table.is_read = 1


# --- Rows of a layer that are to be read ---


@dataclass(frozen=True)
class WantedRows:
    """Rows of a layer, and where each of them goes.

    Parameters
    ----------
    layer
        Whose.
    rows
        int64 row numbers, each once.
    out
        uint8 of shape (any, row_bytes).
    places
        int64, where in `out` each row goes.
    coming
        Who attends to them as they come; None where nobody does.
    """

    layer: int
    rows: NDArray[np.int64]
    out: NDArray[np.uint8]
    places: NDArray[np.int64]
    coming: Coming | None = None

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each row, int64."""
        return self.rows // GROUP_TOKENS

    def only(self, chosen: NDArray[np.bool_]) -> WantedRows:
        """Return some of them, by one flag for each row."""
        coming = None if self.coming is None else self.coming.only(chosen)
        return WantedRows(self.layer, self.rows[chosen], self.out, self.places[chosen], coming)

    def pieces(self, most: int) -> Iterator[WantedRows]:
        """Yield all of them, at most so many at a time."""
        for begin in range(0, len(self.rows), most):
            part = slice(begin, begin + most)
            yield WantedRows(self.layer, self.rows[part], self.out, self.places[part])


# --- Memory that rows land in ---


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

    Any thread may call; a step of a single block's life that does not follow from the one before is
    refused, because two users would then see each other's rows. Blocks of a whole set go through
    it together (`take_all`), with steps that may be done twice.

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
        with self._changed:
            taken = self._first_free(rows)
            for block in taken:
                self._states[block] = BlockState.FILLING
        return taken

    def take_all(self, rows: int, into: list[int]) -> bool:
        """Add blocks to fill for so many rows to a list, or say that not enough are free."""
        with self._changed:
            free = self._first_free(rows)
            if len(free) * self.block_rows < rows:
                return False
            for block in free:
                self._states[block] = BlockState.FILLING
                into.append(block)
        return True

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

    def all_ready(self, blocks: list[int]) -> None:
        """Note that blocks of `take_all` are filled; harmless when done twice."""
        with self._changed:
            for block in blocks:
                if self._states[block] is BlockState.FILLING:
                    self._states[block] = BlockState.READY

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
        self.give_all([block])

    def give_all(self, blocks: list[int]) -> None:
        """Free blocks and empty the list, as `give` does; harmless when done twice."""
        with self._changed:
            for block in blocks:
                state = self._states[block]
                if state in (BlockState.FREE, BlockState.FILLING):
                    raise RuntimeError(f"block {block} is {state.value}: not to be freed")
            self.free_all(blocks)

    def abandon(self, block: int) -> None:
        """Free a block whose filling failed; RuntimeError where it was not being filled."""
        with self._changed:
            if self._states[block] is not BlockState.FILLING:
                raise RuntimeError(f"block {block} is {self._states[block].value}: not filling")
            self._states[block] = BlockState.FREE
            self._changed.notify_all()

    def free_all(self, blocks: list[int]) -> None:
        """Free blocks of `take_all`, whatever they are, and empty the list.

        Nobody reads to them or looks at them any more. After an interrupt the list has those that
        are not free yet.
        """
        free = BlockState.FREE
        with self._changed:
            while blocks:
                # An interrupt may come behind any call, so there is none until the list knows.
                self._states[blocks[-1]] = free
                del blocks[-1]
            self._changed.notify_all()

    def states(self) -> list[BlockState]:
        """Return every block's state."""
        with self._changed:
            return list(self._states)

    def _first_free(self, rows: int) -> list[int]:
        free = [i for i, state in enumerate(self._states) if state is BlockState.FREE]
        return free[: -(-rows // self.block_rows)]

    def _advance(self, block: int, state: BlockState) -> None:
        with self._changed:
            if self._states[block] is not _BEFORE[state]:
                raise RuntimeError(
                    f"block {block} is {self._states[block].value}: it cannot become {state.value}"
                )
            self._states[block] = state


T = TypeVar("T")


class RowBuffers:
    """Two buffers of rows that all reads of a runtime take turns with.

    One is filled while the caller computes on the other.

    Parameters
    ----------
    rows, row_bytes
        Size of each.

    Attributes
    ----------
    rows, row_bytes
        As given.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        size = 2 * rows * row_bytes
        self._both = aligned_buffer(size)[:size].reshape(-1, row_bytes)
        self._buffers = self._both[:rows], self._both[rows:]
        self._promoting: list[Future[tuple[int, int]] | None] = [None, None]
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-gather")
        self._upcoming: Future[Any] | None = None

    def begin(self, fill: Callable[[], T]) -> Future[T]:
        """Let the thread of these buffers call what fills one that it takes."""
        upcoming = self._upcoming = self._ahead.submit(fill)
        return upcoming

    def take(self, which: int, rows: int) -> NDArray[np.uint8]:
        """Return the first `rows` of buffer 0 or 1, uint8 (rows, row_bytes).

        Nothing is promoted from it any more.
        """
        promoting, self._promoting[which] = self._promoting[which], None
        if promoting is not None:
            wait([promoting])
        return self._buffers[which][:rows]

    def lend(self, which: int, promoting: Future[tuple[int, int]]) -> None:
        """Leave a buffer alone until a promotion from it has ended."""
        self._promoting[which] = promoting

    def take_both(self) -> NDArray[np.uint8]:
        """Return the two buffers as one, uint8 (2 · rows, row_bytes), which `take` has parts of.

        Nothing is promoted from it any more.
        """
        for which in range(2):
            self.take(which, 0)
        return self._both

    def behind(self, rows: int) -> NDArray[np.uint8]:
        """Return what is behind the first rows of both, while those are promoted or looked at.

        `take_both` was called since the rest was lent.
        """
        return self._both[rows:]

    def lend_both(self, promoting: Future[tuple[int, int]]) -> None:
        """Leave both alone until a promotion from them has ended."""
        for which in range(2):
            self.lend(which, promoting)

    def settle(self) -> None:
        """Wait for a stream that was left in the middle: all reads share these buffers."""
        if self._upcoming is not None:
            wait([self._upcoming])

    def close(self) -> None:
        """Stop the thread."""
        self._ahead.shutdown(cancel_futures=True)
