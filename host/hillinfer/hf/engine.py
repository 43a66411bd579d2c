# SPDX-License-Identifier: Apache-2.0
"""The engine that all caches of an attached model share, and whose turn it is to use it."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, replace
from types import FrameType, TracebackType

from hillinfer.engine.budget_growth import SharedNeed
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError, CacheUseError
from hillinfer.hf.batch import Batch, CacheFamily, Expectation
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import Loan
from hillinfer.sessions.opening import SavedSession
from hillinfer.statistics import CacheStatistics, Counters, LayerHits
from hillinfer.store.store import Store

# --- whose turn it is ---

# A user's thread gets no word where a use broke off by an interrupt, so it looks by itself.
_LOOK_AGAIN_S = 0.05
# Two that look at once would each find garbage collected or not as the other has just set it.
_LOOKING = threading.RLock()
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Use:
    """What one thread does with a cache from now until `end`, or until a call of it is over.

    Torch runs no hook after a forward pass that Ctrl-C broke off, so `end` may never be called.
    Such a use is over all the same: the call that it belongs to is no longer on its thread's stack.
    Until `end` it keeps the variables of that call alive.

    Parameters
    ----------
    frame
        Of that call, in the calling thread.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()
        self.over = threading.Event()

    def end(self) -> None:
        """Note that it is over; harmless when done twice."""
        self._frame = None
        self.over.set()

    def is_of(self, frame: FrameType) -> bool:
        """Whether it belongs to this call and is not over."""
        return self._frame is frame

    @property
    def is_own(self) -> bool:
        """Whether the thread that asks is in the middle of it."""
        return self._thread == threading.get_ident() and self.is_under_way

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread is in the middle of it."""
        return self._thread != threading.get_ident() and self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether any thread is in the middle of it."""
        wanted = self._frame
        if wanted is None:
            return False
        own = self._thread == threading.get_ident()
        frame = sys._getframe() if own else _frame_of(self._thread)
        while frame is not None:
            if frame is wanted:
                return True
            if frame.f_back is None and not own and frame.f_code.co_flags & _SUSPENDS:
                # It was left while its stack was walked: nothing is known until the next look.
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def _frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of another thread, or None where it has ended.

    CPython before 3.11.9 may collect garbage meanwhile, and holds a lock that threads begin and end
    under. Where what is collected lets another thread go on that begins one, all would stand still.
    """
    with _LOOKING:
        collects = gc.isenabled()
        # Ctrl-C may come behind any call: behind this one, too, garbage is collected again.
        try:
            gc.disable()
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


class Turns:
    """Lets uses of different threads begin one after the other, in the order in which they came."""

    def __init__(self) -> None:
        # A signal's handler may use a cache while its thread holds this.
        self._lock = threading.RLock()
        # The first has its turn. Held weakly, because the frame of a use holds its cache.
        self._queue: deque[weakref.ref[Use]] = deque()

    @property
    def is_own(self) -> bool:
        """Whether the thread that asks is in the middle of the use whose turn it is."""
        first = self._first()
        return first is not None and first.is_own

    def take(self, use: Use) -> None:
        """Wait until it is a use's turn, which lasts until the use is over.

        Raises
        ------
        CacheUseError
            Where this thread is in the middle of another use, for which it would wait for ever.
        """
        self._queue.append(weakref.ref(use))
        while (first := self._first()) is not use:
            # It is in the queue itself, and under way.
            assert first is not None
            if first.is_own:
                use.end()
                raise CacheUseError(
                    "a forward pass is under way in this thread, of this cache or of another of "
                    "the same attachment, which share files and threads: wait until it is through"
                )
            first.over.wait(_LOOK_AGAIN_S)

    def _first(self) -> Use | None:
        """Return whose turn it is, after those that are over have left."""
        with self._lock:
            while self._queue:
                place = self._queue[0]
                first = place()
                if first is not None and first.is_under_way:
                    return first
                with suppress(ValueError):
                    self._queue.remove(place)
        return None


# --- the engine ---

# How the names of all threads begin that runtimes start.
RUNTIME_THREADS = "hillinfer-"
_STORE_ROOM = os.path.dirname(inspect.getfile(Store))  # noqa: PTH120


def _is_within_a_store() -> bool:
    """Whether this thread is in the middle of a store's own code, whose locks it may hold.

    The garbage collector runs anywhere, and closing a runtime gives its store back what it leases.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_STORE_ROOM):
            return True
        frame = frame.f_back
    return False


class _Part:
    """What a sequence does in steps of several caches, for the family of its own.

    Parameters
    ----------
    counters, hits
        The sequence's, which go on counting.
    """

    def __init__(self, family: CacheFamily, counters: Counters, hits: LayerHits) -> None:
        self.counters = counters
        self._family = family
        self._hits = hits
        self._before, self._hits_before = replace(counters), hits.copy()

    def credit(self) -> None:
        """Add what was counted since the last time."""
        now, hits = replace(self.counters), self._hits.copy()
        self._family.counters.add_since(now, self._before)
        self._family.hits.add_since(hits, self._hits_before)
        self._before, self._hits_before = now, hits


class Engine:
    """Files, threads, buffers and the one DRAM budget of all caches of an attached model.

    Caches use it in turns, and the last that leaves closes it. All of them belong to the process
    that made it: a fork of it has none of the threads, and must leave alone what the parent goes on
    using.

    A cache is closed by its user or dropped. The garbage collector drops one in whatever thread it
    happens to run, in the middle of anything, so `drop` never waits.

    Parameters
    ----------
    runtime
        Open; is closed with the last cache.

    Attributes
    ----------
    turns
        Taken by whoever uses the runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        # Deques, because their methods are atomic without a lock.
        self._members: deque[None] = deque()
        self._dropped: deque[Batch] = deque()
        # Held for moments, and never waited for by who drops a cache.
        self._counting = threading.Lock()
        self._planning = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._families: weakref.WeakSet[CacheFamily] = weakref.WeakSet()
        # Whose doings the runtime counts, and what it had counted before.
        self._served: CacheFamily | None = None
        self._parts: list[_Part] = []
        self._before = Counters()
        self._hits_before = LayerHits(runtime.shape.layers)
        self.turns = Turns()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that made the engine."""
        return self._process != os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether its last cache is closed or dropped."""
        return self._closed

    @property
    def open_caches(self) -> int:
        """How many caches use it."""
        return len(self._members)

    # --- who uses it -----------------------------------------------------------------------

    def join(self) -> bool:
        """Count one cache more; False where the last left and it is closed."""
        with self._counting:
            if self._closed:
                return False
            self._members.append(None)
            return True

    def part(self) -> None:
        """Count one cache less, which had no rows; close the runtime after the last."""
        self._members.pop()
        self._close_after_the_last()

    def open_family(self, expectation: Expectation) -> CacheFamily:
        """Make room for a cache and its forks beside those that are there.

        Raises
        ------
        BudgetError
            Where the budget is in bytes and does not hold what all of them are said to get.
        """
        family = CacheFamily(expectation, self.runtime.shape.layers)
        with self._planning:
            # A user may keep a closed cache; it expects nothing any more.
            families = [*(one for one in self._families if one.is_open), family]
            if len(families) > 1 or self.runtime.parts.accountant.lent_bytes:
                self._make_room(families)
            self._families.add(family)
            self.runtime.expect(max(one.expectation.least_tokens for one in families))
        return family

    def resume(self, family: CacheFamily, saved: SavedSession, tokens: int) -> Sequence:
        """Return a sequence of the first tokens of a saved session, once it is this one's turn.

        Parameters
        ----------
        saved, tokens
            As for `Runtime.resume`.
        """
        with Use(sys._getframe()) as use:
            self.turns.take(use)
            self.free_dropped()
            self.serve(family)
            return self.runtime.resume(saved, tokens)

    def leave(self, family: CacheFamily, batch: Batch) -> None:
        """Free the sequences of one cache, count it no more and close the runtime after the last.

        Parameters
        ----------
        family, batch
            That cache's, and its rows; they are empty afterwards.
        """
        # What an interrupt leaves of it is freed by the next use.
        self._dropped.append(batch)
        try:
            self.free_dropped()
        finally:
            family.lose()
            self._members.pop()
            self._close_after_the_last()

    def drop(self, family: CacheFamily, batch: Batch) -> None:
        """Count a cache no more that nobody closed; safe in any thread at any moment.

        Its sequences are freed by `free_dropped`. After the last cache the runtime is closed
        instead: here, or where this thread would wait for itself, in a fresh one that the
        interpreter waits for at its exit.
        """
        if self.is_inherited:
            return
        self._dropped.append(batch)
        family.lose()
        self._members.pop()
        self._close_after_the_last()

    def free_dropped(self) -> None:
        """Free the sequences of dropped caches, in the thread that is about to use the runtime."""
        while self._dropped:
            batch = self._dropped[0]
            # An interrupt leaves it to the next.
            batch.clear()
            # Another use may have come in between, of what garbage held.
            with suppress(ValueError):
                self._dropped.remove(batch)

    def _close_after_the_last(self) -> None:
        # Who holds it is about to be a cache of this engine, or closes it.
        if self._members or not self._counting.acquire(blocking=False):
            return
        try:
            if self._members or self._closed:
                return
            self._closed = True
        finally:
            self._counting.release()
        # Any runtime's thread: two of them may each hold the last cache of the other's.
        if threading.current_thread().name.startswith(RUNTIME_THREADS) or _is_within_a_store():
            threading.Thread(
                target=self.runtime.close, name=f"{RUNTIME_THREADS}close", daemon=False
            ).start()
        else:
            self.runtime.close()

    # --- what it has room for --------------------------------------------------------------

    def has_room(self, expectation: Expectation, without: Collection[CacheFamily] = ()) -> bool:
        """Return whether a cache would have room beside those that are open, some of them closed.

        Parameters
        ----------
        without
            Those that would be closed first.
        """
        own = CacheFamily(expectation, self.runtime.shape.layers)
        with self._planning:
            left = [one for one in self._families if one.is_open and one not in without]
            try:
                self._shadow_limit([*left, own])
            except BudgetError:
                return False
        return True

    def lend(self, byte_count: int) -> Loan | None:
        """Lend bytes of the budget to whoever answers beside these caches, until they come back.

        None where they are not spare, or caches that are open are expected to need them.
        """
        accountant = self.runtime.parts.accountant
        with self._planning:
            families = [one for one in self._families if one.is_open]
            try:
                limit = self._shadow_limit(families, byte_count)
            except BudgetError:
                return None
            loan = accountant.lend(byte_count)
            if loan is not None and limit is not None:
                self.runtime.limit_shadows(limit)
            return loan

    def _make_room(self, families: Collection[CacheFamily]) -> None:
        limit = self._shadow_limit(families)
        if limit is None:
            self.runtime.cover(sum(one.tokens for one in families))
        else:
            self.runtime.limit_shadows(limit)

    def _shadow_limit(self, families: Collection[CacheFamily], lent: int = 0) -> int | None:
        """Return the most bytes of shadows in DRAM; None where the budget follows the context.

        BudgetError where it has no room for all of them beside what is lent, and so much more.
        """
        runtime = self.runtime
        if runtime.follows_context:
            return None
        known = [one.expectation.tokens is not None for one in families]
        need = SharedNeed(
            len(known),
            sum(one.tokens for one in families) if all(known) else None,
            sum(one.sequences for one in families),
            runtime.parts.accountant.lent_bytes + lent,
        )
        return need.shadow_limit(runtime.shape, runtime.settings, runtime.budget_bytes)

    # --- what it did -----------------------------------------------------------------------

    def serve(self, family: CacheFamily) -> None:
        """Count for a family from here on, whose turn it is."""
        if self._served is not family:
            self._credit()
            self._served, self._parts = family, []

    def serve_together(
        self, family: CacheFamily, parts: Collection[tuple[CacheFamily, Sequence]]
    ) -> None:
        """Count for a family of caches that take steps together, and for each of them its own.

        What no sequence is known for, such as bytes of shadows, is counted for all of them alone.

        Parameters
        ----------
        family
            Of all of them, whose turn it is.
        parts
            Their own families, and the sequences that take part.
        """
        known = [id(one.counters) for one in self._parts]
        if self._served is family and known == [id(one.counters) for _, one in parts]:
            return
        self._credit()
        self._served = family
        self._parts = [_Part(own, one.counters, one.layer_hits) for own, one in parts]

    def statistics(self, family: CacheFamily | None = None) -> CacheStatistics:
        """Return what a family did, in memory that all share, or all caches, closed ones too.

        Waits until the pass of another thread is through: whole steps are counted.

        Parameters
        ----------
        family
            One of the engine's, None for all.
        """
        # Also in the middle of a pass.
        if self.turns.is_own:
            return self._statistics(family)
        with Use(sys._getframe()) as use:
            self.turns.take(use)
            return self._statistics(family)

    def _statistics(self, family: CacheFamily | None) -> CacheStatistics:
        whole = self.runtime.statistics()
        if family is None:
            return whole
        self._credit()
        sequences = {id(one): one for batch in family.batches() for one in batch.sequences()}
        return replace(
            whole,
            kv_bytes=self.runtime.kv_bytes(list(sequences.values())),
            layer_hit_rates=family.hits.rates(),
            **asdict(family.counters),
        )

    def _credit(self) -> None:
        """Add what was counted since to whoever was served, promotions under way included."""
        if self._served is None:
            return
        counters, hits = self.runtime.counted()
        self._served.counters.add_since(counters, self._before)
        self._served.hits.add_since(hits, self._hits_before)
        for part in self._parts:
            part.credit()
        self._before, self._hits_before = counters, hits
