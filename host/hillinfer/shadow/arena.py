# SPDX-License-Identifier: Apache-2.0
"""Memory for the shadows of one layer, side by side and in huge pages as far as they cover them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hillinfer.drive.files import PAGE_BYTES, aligned_buffer, private_memory, round_up
from hillinfer.system.kept_memory import HUGE_BYTES

# --- Huge pages ---

# Of Linux 6.1, which Python has no name for: makes a huge page now, of what is there already.
_MADV_COLLAPSE = 25
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# While one is made, its memory is there twice: this process never has that of two.
_COLLAPSING = threading.Lock()


class HugePages:
    """What runs ask of the system for their memory."""

    @property
    def are_allowed(self) -> bool:
        """Whether this machine makes huge pages for those who ask."""
        return huge_pages_allowed()

    def advise(self, mapping: mmap.mmap, advice: int, start: int, byte_count: int) -> None:
        """Tell what is to become of some bytes of a mapping; OSError where that is refused."""
        mapping.madvise(advice, start, byte_count)

    def collapse(self, address: int, byte_count: int) -> None:
        """Make huge pages of memory that is there, now, as far as the system can."""
        _madvise(address, byte_count, _MADV_COLLAPSE)

    def in_background(self, work: Callable[[], None]) -> None:
        """Do something in a thread of its own; RuntimeError where none starts."""
        threading.Thread(target=work, name="hillinfer-huge-page", daemon=True).start()


class _Holder(weakref.ref[NDArray[np.uint8]]):
    """The array over a place."""

    place = -1


class HugeRun:
    """Address space for places, which are memory only while somebody holds them.

    A huge page is memory as a whole. So one is asked for only once taken places cover all of it:
    what a run takes is the places' bytes and no more, whatever pages it is made of. A place comes
    back when the last array over it goes, or, while a huge page is made, some milliseconds later.

    Parameters
    ----------
    place_bytes
        Of each place, whole pages.
    system
        What is asked for memory; this machine's where None.

    Raises
    ------
    OSError
        Where the system has no address space left, or refuses what is asked of it.
    """

    def __init__(self, place_bytes: int, places: int, system: HugePages | None = None) -> None:
        if place_bytes < 1 or place_bytes % PAGE_BYTES or places < 1:
            raise ValueError(
                f"a run has at least one place of whole pages, not {places} of {place_bytes} bytes"
            )
        self._place_bytes = place_bytes
        self._system = system or HugePages()
        # One more huge page, so that the first place can begin at one.
        size = round_up(places * place_bytes, HUGE_BYTES) + HUGE_BYTES
        self._mapping = private_memory(size)
        address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        self._start = -address % HUGE_BYTES
        self._address = address + self._start
        # Where huge pages come unasked, they would be memory that nobody counted. What is asked
        # for later is tried here, where nothing is lost by it.
        for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_DONTNEED):
            self._system.advise(self._mapping, advice, 0, size)
        self._collapses = self._system.are_allowed
        self._taken = bytearray(places)
        self._joined = bytearray(size // HUGE_BYTES)
        # Of each place the last; what an interrupted `take` left behind is none of them.
        self._holders: dict[int, _Holder] = {}
        self._returned: deque[_Holder] = deque()
        self._changing = threading.RLock()

    def take(self, coming: int = 0) -> NDArray[np.uint8] | None:
        """Return the first free place, page-aligned zeros, or None where all are taken.

        Parameters
        ----------
        coming
            Places that are taken right after it: huge pages that they are going to cover come as
            such when they are first written to. `end_coming` is to follow.
        """
        try:
            with self._changing:
                self._clear_returned()
                place = self._taken.find(0)
                return None if place < 0 else self._memory_of(place, coming)
        finally:
            self._settle()

    def end_coming(self) -> None:
        """Learn that what was coming has come, or does not come: huge pages are covered again."""
        try:
            with self._changing:
                for page in range(len(self._joined)):
                    if self._joined[page] and not self._is_covered(page):
                        self._leave(page)
        finally:
            self._settle()

    @property
    def taken_bytes(self) -> int:
        """Bytes of the places that are taken."""
        return sum(self._taken) * self._place_bytes

    @property
    def addresses(self) -> range:
        """The address space of all places, memory or not."""
        first = self._address - self._start
        return range(first, first + len(self._mapping))

    def _memory_of(self, place: int, coming: int) -> NDArray[np.uint8]:
        """Take a place; interrupted anywhere, it is free, or soon will be."""
        memory: NDArray[np.uint8] = np.frombuffer(
            self._mapping, np.uint8, self._place_bytes, self._offset(place)
        )
        # Called after the holder's callback, which was made last.
        weakref.finalize(memory, self._settle).atexit = False
        # No line of Python, which Ctrl-C could come before.
        holder = self._holders[place] = _Holder(memory, self._returned.append)
        holder.place = place
        self._taken[place] = 1
        for page in self._pages(place):
            if self._joined[page]:
                continue
            if self._is_covered(page):
                self._join(page)
            elif coming and self._collapses and self._is_going_to_be(page, place, coming):
                self._joined[page] = 1
                with suppress(OSError):
                    self._advise(mmap.MADV_HUGEPAGE, page)
        return memory

    def _settle(self) -> None:
        """Clear what came back, in whatever thread and in the middle of whatever it does."""
        # Whoever is changing the run looks again afterwards, this very thread further up perhaps.
        while self._returned and not self._changing._is_owned():  # type: ignore[attr-defined]
            # Ctrl-C may come between any two calls, so there is none between `try` and what it
            # is for, and none before the release.
            try:
                if not self._changing.acquire(blocking=False):
                    return
                self._clear_returned()
            finally:
                try:  # noqa: SIM105
                    self._changing.release()
                except RuntimeError:
                    # Somebody else has it.
                    pass

    def _clear_returned(self) -> None:
        # Each stays in line until all is done: interrupted, all is done once more.
        while self._returned:
            holder = self._returned[0]
            if self._holders.get(holder.place) is holder and self._taken[holder.place]:
                self._clear(holder.place)
            self._returned.popleft()

    def _clear(self, place: int) -> None:
        for page in self._pages(place):
            if self._joined[page]:
                with suppress(OSError):
                    self._advise(mmap.MADV_NOHUGEPAGE, page)
                self._joined[page] = 0
        start = self._offset(place)
        try:
            self._system.advise(self._mapping, mmap.MADV_DONTNEED, start, self._place_bytes)
        except OSError:
            # Somebody locked the process's memory since. The next to take it expects zeros.
            self._mapping[start : start + self._place_bytes] = bytes(self._place_bytes)
        self._taken[place] = 0

    def _leave(self, page: int) -> None:
        """Give back what a huge page has beyond places that are taken."""
        with suppress(OSError):
            self._advise(mmap.MADV_NOHUGEPAGE, page)
        self._joined[page] = 0
        for place in self._places(page):
            if not self._taken[place]:
                with suppress(OSError):
                    start = self._offset(place)
                    self._system.advise(self._mapping, mmap.MADV_DONTNEED, start, self._place_bytes)

    def _join(self, page: int) -> None:
        """Make a huge page of one that is covered, which most of its places were written to."""
        self._joined[page] = 1
        if not self._collapses:
            return
        with suppress(OSError, RuntimeError):
            self._advise(mmap.MADV_HUGEPAGE, page)
            # It waits for every processor's turn, and whoever takes a place is in the middle of a
            # step. At most one for each huge page there will ever be, and soon gone.
            self._system.in_background(partial(self._collapse, page))

    def _collapse(self, page: int) -> None:
        """Make a huge page now, unless a place of it went meanwhile."""
        with _COLLAPSING, self._changing:
            # Were a place free, its part would be memory that nobody counted.
            if self._joined[page]:
                # Refused for want of whole huge pages, while a drive reads one, or before 6.1: the
                # system then makes one when it gets to it.
                self._system.collapse(self._address + page * HUGE_BYTES, HUGE_BYTES)
        self._settle()

    def _advise(self, advice: int, page: int) -> None:
        start = self._start + page * HUGE_BYTES
        self._system.advise(self._mapping, advice, start, HUGE_BYTES)

    def _offset(self, place: int) -> int:
        return self._start + place * self._place_bytes

    def _pages(self, place: int) -> range:
        """Return the huge pages that a place lies in."""
        start = place * self._place_bytes
        return range(start // HUGE_BYTES, (start + self._place_bytes - 1) // HUGE_BYTES + 1)

    def _places(self, page: int) -> range:
        """Return the places that lie in a huge page."""
        start, stop = page * HUGE_BYTES, (page + 1) * HUGE_BYTES
        last = (stop - 1) // self._place_bytes
        return range(start // self._place_bytes, min(last + 1, len(self._taken)))

    def _is_covered(self, page: int) -> bool:
        """Say whether taken places cover all of a huge page."""
        if (page + 1) * HUGE_BYTES > len(self._taken) * self._place_bytes:
            return False
        own = self._places(page)
        return all(self._taken[own.start : own.stop])

    def _is_going_to_be(self, page: int, place: int, coming: int) -> bool:
        """Say whether a huge page that begins in a place is covered once so many more came."""
        if (page + 1) * HUGE_BYTES > len(self._taken) * self._place_bytes:
            return False
        own = self._places(page)
        # What lies before it was written to, perhaps, and is there in small pages.
        begins_here = own.start == place
        return (
            begins_here
            and own.stop - 1 <= place + coming
            and not any(self._taken[place + 1 : own.stop])
        )


def huge_pages_allowed(switch: Path = _SWITCH) -> bool:
    """Say whether this machine makes huge pages for those who ask."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False


def _madvise(address: int, byte_count: int, advice: int) -> None:
    """Advise without Python's lock, which `mmap.madvise` holds on to."""
    call = ctypes.CDLL(None).madvise
    call(ctypes.c_void_p(address), ctypes.c_size_t(byte_count), ctypes.c_int(advice))


# --- Shadows of one layer ---

# Address space is taken in runs of at least so many bytes; memory only with each place.
RUN_BYTES = 32 << 20
_MAKE_RUN = HugeRun if hasattr(mmap, "MADV_HUGEPAGE") else None


class ShadowArena:
    """Gives every shadow the first free place, so that a sequence's lie next to each other.

    A processor reads on from one segment into the next without waiting, and huge pages spare it
    translations. Where the system cannot do it each shadow is memory of its own.

    Parameters
    ----------
    place_bytes
        Of a shadow, whole pages.
    run_bytes
        Address space that is taken at a time, at least.
    make_run
        Makes a run of places of so many bytes, and so many of them; OSError where it cannot. None
        where the system knows no huge pages.
    """

    def __init__(
        self,
        place_bytes: int,
        run_bytes: int = RUN_BYTES,
        make_run: Callable[[int, int], HugeRun] | None = _MAKE_RUN,
    ) -> None:
        self._place_bytes = place_bytes
        self._run_bytes = run_bytes
        # None once the system refused.
        self._make_run = make_run
        self._runs: list[HugeRun] = []
        self._growing = threading.Lock()
        # Places that are going to be taken one after another.
        self._coming = 0

    def begin_coming(self, places: int) -> None:
        """Learn that so many places are taken one after another; `end_coming` follows."""
        self._coming = places

    def end_coming(self) -> None:
        """Learn that they have come, or do not come."""
        self._coming = 0
        for run in self.runs:
            run.end_coming()

    def take(self) -> NDArray[np.uint8]:
        """Return page-aligned zeros, uint8 (place_bytes,), which are free again once forgotten."""
        with self._growing:
            self._coming = max(0, self._coming - 1)
            for run in self._runs:
                memory = run.take(self._coming)
                if memory is not None:
                    return memory
            memory = self._from_new_run()
        return aligned_buffer(self._place_bytes) if memory is None else memory

    @property
    def runs(self) -> tuple[HugeRun, ...]:
        """What shadows lie in; those that are memory of their own lie in none."""
        return tuple(self._runs)

    def _from_new_run(self) -> NDArray[np.uint8] | None:
        if self._make_run is None:
            return None
        try:
            run = self._make_run(self._place_bytes, -(-self._run_bytes // self._place_bytes))
        except OSError:
            self._make_run = None
            return None
        self._runs.append(run)
        return run.take(self._coming)


class ComingShadows:
    """Tells arenas how many shadows are about to be made in them, one after another."""

    def __init__(self) -> None:
        self._count = 0
        self._told: list[ShadowArena] = []

    @contextmanager
    def expected(self, count: int) -> Iterator[None]:
        """Make so many segments of one sequence in a block.

        Their shadows come in huge pages from the beginning, and not in small ones first.
        """
        self._count = count
        try:
            yield
        finally:
            told, self._told, self._count = self._told, [], 0
            for arena in told:
                arena.end_coming()

    def tell(self, arenas: Iterable[ShadowArena]) -> None:
        """Tell the arenas of a segment that is made, of each layer one."""
        if self._count and not self._told:
            self._told = list(arenas)
            for arena in self._told:
                arena.begin_coming(self._count)
