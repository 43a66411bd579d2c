# SPDX-License-Identifier: Apache-2.0
"""The prefetch buffer: memory that cold rows land in, ahead of their layer or on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.landing import LandingArea, WantedRows
from hillinfer.drive.read_engines import LandingAhead
from hillinfer.kv.cold_store import ColdStore
from hillinfer.native.signatures import Awaited
from hillinfer.trace.recorder import ReadCost


class LandedRows:
    """Which rows land where; grows in the order of positions while they are read.

    Parameters
    ----------
    reading
        What reading them took, once no more is read ahead, or what went wrong. The others may look
        at rows then; the one that reads adds them before.

    Attributes
    ----------
    blocks
        Blocks of the landing area that hold them.
    is_wanted
        Attention waits: what has no room yet is not waited for.
    positions
        Of the rows, int64, ascending: a part of the selection.
    places
        Where each of them lies, int64: rows of the landing area.
    ahead
        How they come where the library's own thread lands them all; then they are there once `end`
        was called.
    promoting
        Who copies some of them from there; None where nobody does.
    """

    def __init__(self, reading: Future[ReadCost]) -> None:
        self.reading = reading
        self.ahead: LandingAhead | None = None
        self.promoting: Future[tuple[int, int]] | None = None
        self.blocks: list[int] = []
        self.is_wanted = False
        self.positions: NDArray[np.int64] = np.zeros(0, np.int64)
        self.places: NDArray[np.int64] = np.zeros(0, np.int64)
        self._ending = threading.Lock()

    def begin(self, ahead: LandingAhead, cost: Callable[[LandingAhead], ReadCost]) -> None:
        """Let the library's thread land all of them: nobody of Python's is told when they come.

        Parameters
        ----------
        ahead
            The errand.
        cost
            Waits for it and returns what it took; see `ColdStore.landed_ahead`.
        """
        # Noted first: then it is waited for, begun or not.
        self._cost, self.ahead = cost, ahead
        ahead.begin()

    def end(self) -> None:
        """Wait for rows that the library's thread lands; harmless for others, and done twice."""
        if self.ahead is None:
            return
        with self._ending:
            if self.reading.done():
                return
            # An interrupt leaves all of it to the next who asks, and blocks are not free before.
            try:
                cost = self._cost(self.ahead)
            except Exception as error:
                self.reading.set_exception(error)
            else:
                self.reading.set_result(cost)

    @property
    def awaited(self) -> Awaited | None:
        """What a call of the library is told that is to wait for all of them, or None."""
        return None if self.ahead is None else self.ahead.awaited

    def fault(self) -> BaseException | None:
        """Return what went wrong, once they are there; None where nothing did."""
        self.end()
        return self.reading.exception()

    def add(
        self, blocks: list[int], positions: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Take over blocks that are filled.

        Parameters
        ----------
        blocks
            Of the landing area.
        positions
            int64, ascending, behind all that were added before.
        places
            int64, of the same length.
        """
        self.blocks += blocks
        self.positions = np.concatenate([self.positions, positions])
        self.places = np.concatenate([self.places, places])

    def among(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each of some positions, int64, each once, whether its row landed."""
        if not len(self.positions):
            return np.zeros(len(positions), np.bool_)
        places = np.searchsorted(self.positions, positions)
        return np.asarray(self.positions.take(places, mode="clip") == positions)

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of rows that landed, by position."""
        return self.places[np.searchsorted(self.positions, positions)]


class LandingThread:
    """A thread that calls what it is given, in that order; no program waits for it at its end.

    It may wait for room that a pass which broke off does not make any more, and an executor's
    threads are waited for before whoever could tell it is asked to.
    """

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Have something called; RuntimeError after `close`, and where no thread can be started."""
        with self._starting:
            if self._is_closed:
                raise RuntimeError("nothing is read ahead any more")
            if self._thread is None:
                self._start()
            self._calls.put(call)

    def close(self) -> None:
        """End once all is called that was given."""
        with self._starting:
            self._is_closed = True
            self._calls.put(None)
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        # Noted first: an interrupt may come when it runs already.
        self._thread = threading.Thread(target=self._run, name="hillinfer-land", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            if not self._thread.is_alive():
                self._thread = None
            raise

    def _run(self) -> None:
        for call in iter(self._calls.get, None):
            call()
        # For one more that an interrupt left, as it seemed not to be there.
        self._calls.put(None)


@dataclass
class _Waiting:
    """A set of rows to be read ahead: what is left of it, and what it took so far."""

    landed: LandedRows
    layer: int
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    cost: ReadCost


class _Part(NamedTuple):
    """The first so many rows that are left of a set, and the blocks that they go to."""

    of: _Waiting
    size: int
    blocks: list[int]
    places: NDArray[np.int64]


class PrefetchBuffer:
    """Rows read ahead, from the first read to the last look at them.

    A block of the landing area is freed when nobody looks at it any more. A thread of the library's
    lands a set that has room at once and lies in the store's own files. All others are read by a
    thread of Python's: sets of one layer that stand in line, as those of caches that take a step
    together, are read as one.

    Parameters
    ----------
    store
        Where rows are read.
    landing
        Where they land.

    Attributes
    ----------
    unclaimed, claimed
        What landed and no attention has taken over, in the order in which it is read, and what one
        has, until it is let go, whatever an interrupt leaves out; to be looked at only.
    """

    def __init__(self, store: ColdStore, landing: LandingArea) -> None:
        self._store, self.landing = store, landing
        # One of its own: reads on demand must not wait in line behind it.
        self._reading = LandingThread()
        self._is_closed = self._gathers = False
        self._unclaimed: list[LandedRows] = []
        self.unclaimed: Sequence[LandedRows] = self._unclaimed
        self._claimed: list[LandedRows] = []
        self.claimed: Sequence[LandedRows] = self._claimed
        # What the thread that reads has not looked at.
        self._line, self._beginning = deque[_Waiting](), threading.Lock()
        # None where somebody looks at each read, or nothing is read ahead.
        self._lander = store.lander() if landing.blocks else None

    @property
    def gathers(self) -> bool:
        """Whether what several want of a layer is being brought together; see `together`."""
        return self._gathers

    @property
    def rows(self) -> NDArray[np.uint8]:
        """All that landed, uint8 of shape (any, row_bytes), by the places that `LandedRows` has."""
        return self.landing.rows

    def begin(
        self, layer: int, positions: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> LandedRows | None:
        """Begin to read cold rows, and go on as blocks become free until attention wants them.

        Parameters
        ----------
        layer
            Whose.
        positions, rows
            int64 positions, ascending, and their row numbers.

        Returns
        -------
        What lands where, or None where nothing does.
        """
        if not len(rows) or not self.landing.blocks:
            return None
        landed = LandedRows(Future())
        # Noted first: an interrupt must not leave a reading that nobody knows of.
        with self._beginning:
            is_next = self._may_land_at_once()
            self._unclaimed.append(landed)
            if is_next and self._lands_at_once(landed, layer, positions, rows):
                return landed
            self._line.append(_Waiting(landed, layer, positions, rows, ReadCost()))
            try:
                self._reading.submit(self._land_next)
            except RuntimeError:
                # The system starts no thread. Should one come later, it is not to read this.
                landed.reading.cancel()
                self._line.pop()
                self._unclaimed.remove(landed)
                raise
        return landed

    def together(self, begin: Callable[[], None]) -> None:
        """Call what begins to read for several; what they want of a layer is one batch."""
        gate = threading.Event()
        try:
            self._gathers = True
            self._reading.submit(gate.wait)
            begin()
        finally:
            self._gathers = False
            gate.set()

    def want(self, landed: LandedRows | None) -> None:
        """Let nothing wait for room any more that was begun no later than this.

        What stands before it in line must not wait either: blocks may become free only when
        attention goes on.
        """
        if landed is None or landed.is_wanted:
            return
        for earlier in self._unclaimed[: self._unclaimed.index(landed) + 1]:
            earlier.is_wanted = True
        self.landing.wake()

    def claim(self, landed: LandedRows | None) -> None:
        """Take over what landed; `let_go` must follow."""
        self.want(landed)
        if landed is not None:
            self._claimed.append(landed)
            self._unclaimed.remove(landed)

    def arrive(self, landed: LandedRows | None) -> ReadCost:
        """Wait until it is there, and begin to look at it.

        Raises
        ------
        ColdPoolError
            What went wrong while reading.
        """
        if landed is None:
            return ReadCost()
        landed.end()
        try:
            cost = landed.reading.result()
        except BaseException:
            # It remembers its frames, and they what landed: a circle that keeps files open.
            landed.reading = Future()
            landed.reading.set_result(ReadCost())
            raise
        if landed.ahead is not None:
            self.landing.all_ready(landed.blocks)
        for block in landed.blocks:
            self.landing.use(block)
        return cost

    def let_go(self, landed: LandedRows | None) -> None:
        """Free what landed, once it is there and nobody promotes it; harmless when done twice."""
        if landed is None:
            return
        landed.end()
        # Blocks that Python's thread had something go wrong with are free already.
        if not landed.reading.done():
            wait([landed.reading])
        if landed.promoting is None:
            self._give(landed)
        else:
            # Also called where it is cancelled.
            landed.promoting.add_done_callback(lambda _: self._give(landed))
        if landed in self._claimed:
            self._claimed.remove(landed)

    def abandon_unclaimed(self) -> None:
        """Free what landed for attention that did not come, or that was interrupted as it ended.

        Nothing is being announced, and nobody attends.
        """
        for landed in self._claimed.copy():
            self.let_go(landed)
        for landed in self._unclaimed[::-1]:
            # Its turn may never come: an interrupt may have come before it stood in line.
            if landed.ahead is None and landed.reading.cancel():
                self.landing.free_all(landed.blocks)
            else:
                self.want(landed)
                # An interrupt may have come between a note that it is wanted and the call.
                self.landing.wake()
                self.let_go(landed)
            self._unclaimed.remove(landed)

    def close(self) -> None:
        """Stop the threads that read; what they have begun ends with what they have read."""
        # Who begins now has begun before the library's thread ends, or not at all.
        with self._beginning:
            self._is_closed = True
        try:
            if self._lander is not None:
                self._lander.close()
        finally:
            self.landing.wake()
            self._reading.close()

    def _may_land_at_once(self) -> bool:
        """Whether a thread of the library's reads, and nothing stands in line before that."""
        if self._lander is None or self._gathers or self._is_closed:
            return False
        return all(one.ahead is not None or one.reading.done() for one in self._unclaimed)

    def _lands_at_once(
        self,
        landed: LandedRows,
        layer: int,
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> bool:
        """Let the library's thread land all of a set; False where it cannot."""
        assert self._lander is not None
        if not self.landing.take_all(len(rows), landed.blocks):
            return False
        landed.positions, landed.places = positions, self.landing.places(landed.blocks, len(rows))
        wanted = WantedRows(layer, rows, self.landing.rows, landed.places)
        ahead = self._store.ahead(self._lander, wanted)
        if ahead is None:
            self.landing.free_all(landed.blocks)
            landed.positions, landed.places = positions[:0], landed.places[:0]
            return False
        landed.begin(ahead, partial(self._store.landed_ahead, wanted))
        return True

    def _land_next(self) -> None:
        """Read what stands first in line, and of the same layer what stands behind it."""
        together: list[_Waiting] = []
        with self._beginning:
            while self._line and self._line[0].layer == (together or self._line)[0].layer:
                # What an interrupt left there has no call of its own: it takes nobody else's.
                if (one := self._line.popleft()).landed.reading.set_running_or_notify_cancel():
                    together.append(one)
        try:
            while together:
                self._land(together)
                together = [one for one in together if not one.landed.reading.done()]
        except BaseException as error:
            # Whoever attends is told.
            for one in (one for one in together if not one.landed.reading.done()):
                one.landed.reading.set_exception(error)

    def _land(self, together: list[_Waiting]) -> None:
        """Read what there is room for, wait for room, or end a set that waits no longer."""
        first = together[0]
        parts = [] if self._is_closed else self._parts(together)
        if parts:
            self._fill(parts)
        elif self._is_wanted(first.landed):
            first.landed.reading.set_result(first.cost)
        else:
            self.landing.wait_for_room(partial(self._is_wanted, first.landed))

    def _parts(self, together: list[_Waiting]) -> list[_Part]:
        """Return what there are free blocks for, in the order of the line."""
        parts = []
        for one in together:
            if not (blocks := self.landing.take(len(one.rows))):
                break
            count = min(len(one.rows), len(blocks) * self.landing.block_rows)
            parts.append(_Part(one, count, blocks, self.landing.places(blocks, count)))
        return parts

    def _is_wanted(self, landed: LandedRows) -> bool:
        return landed.is_wanted or self._is_closed

    def _fill(self, parts: list[_Part]) -> None:
        """Read rows to their blocks; a set is there as soon as its own rows are."""
        came, left = 0, deque(zip(parts, accumulate(one.size for one in parts), strict=True))
        try:
            rows = np.concatenate([part.of.rows[: part.size] for part in parts])
            places = np.concatenate([part.places for part in parts])
            wanted = WantedRows(parts[0].of.layer, rows, self.landing.rows, places)
            for count, cost in self._store.read_rows_ahead(wanted):
                # What several are read by is told with the first of them.
                left[0][0].of.cost += cost
                came += count
                while left and left[0][1] <= came:
                    self._note_filled(left.popleft()[0])
        except BaseException as error:
            self._fail([part for part, _ in left], error)

    def _fail(self, parts: list[_Part], error: BaseException) -> None:
        """Tell whoever attends what went wrong with its rows, and not with those of another."""
        for part in parts if len(parts) > 1 else []:
            self._fill([part])
        if len(parts) == 1:
            for block in parts[0].blocks:
                self.landing.abandon(block)
            parts[0].of.landed.reading.set_exception(error)

    def _note_filled(self, part: _Part) -> None:
        one, size = part.of, part.size
        for block in part.blocks:
            self.landing.ready(block)
        one.landed.add(part.blocks, one.positions[:size], part.places)
        one.positions, one.rows = one.positions[size:], one.rows[size:]
        if not len(one.rows):
            one.landed.reading.set_result(one.cost)

    def _give(self, landed: LandedRows) -> None:
        (self.landing.give_all if landed.ahead is None else self.landing.free_all)(landed.blocks)
