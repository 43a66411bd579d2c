# SPDX-License-Identifier: Apache-2.0
"""The engine that all caches of an attached model share, and what a new cache is made with."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from hillinfer.engine.budget_growth import GROWTH_TOKENS, BudgetGrowth, ShadowChoice
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec, open_ended_shadow_limit
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError, SettingsError, SetupWarning
from hillinfer.hf.batch import Batch
from hillinfer.hf.turns import Turns, Use
from hillinfer.kv.hits import LayerHits
from hillinfer.kv.sequence import Sequence
from hillinfer.model_shape import ModelShape
from hillinfer.sessions.opening import SavedSession
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.statistics import CacheStatistics, Counters
from hillinfer.system.machine import MemoryFacts
from hillinfer.values import format_bytes, whole_number

# --- what a new cache is made with ---

# Of the longest: as many as budgets grow for; address space is reserved for all of them.
_MOST_CONTEXTS = 32


@dataclass(frozen=True)
class CachePlan:
    """What a runtime is made with.

    Parameters
    ----------
    settings
        With a named shadow.
    budget_bytes, shadow_limit_bytes
        M0 and the most bytes of full shadows in DRAM, at first where `growth` is given.
    announce_streaming
        Called before the first shadow goes to the drive.
    growth
        How a budget that is a share follows the context; None for a budget in bytes.
    warning
        What a user should know before the cache is used, or None.
    """

    settings: Settings
    budget_bytes: int
    shadow_limit_bytes: int
    announce_streaming: Callable[[], None]
    growth: BudgetGrowth | None = None
    warning: str | None = None

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        settings: Settings,
        expected_tokens: int | None,
        sequences: int,
    ) -> CachePlan:
        """Plan a cache, of unknown length where none is expected.

        Raises
        ------
        BudgetError
            Where a budget in bytes is too small for what is expected.
        SettingsError
            Where the shadow is to be chosen and the length unknown.
        """
        share = settings.dram_budget.share is not None
        if expected_tokens is None and not share:
            return cls._in_bytes(shape, settings)
        if expected_tokens is None:
            # Refused where the shadow's format is still to be chosen.
            kernel_spec(shape, settings)
            growth = _growth(shape, settings, GROWTH_TOKENS, sequences)
            return cls(settings, *growth.at(GROWTH_TOKENS), _warner(shape, settings), growth)
        choice = ShadowChoice.of(shape, settings, expected_tokens, sequences)
        choice.plan.check()
        return cls(
            choice.settings,
            choice.plan.budget_bytes,
            choice.limit_bytes,
            # The plan's own warning says it, and sooner.
            _said if choice.warning or not share else _warner(shape, choice.settings),
            _growth(shape, choice.settings, expected_tokens, sequences) if share else None,
            choice.warning,
        )

    @classmethod
    def _in_bytes(cls, shape: ModelShape, settings: Settings) -> CachePlan:
        budget_bytes = settings.dram_budget.resolve(0)
        limit = open_ended_shadow_limit(shape, settings, budget_bytes)
        return cls(settings, budget_bytes, limit, _warner(shape, settings))


def checked_count(name: str, value: Any) -> int:
    """Return an argument that counts something; SettingsError where it is no number from 1 on."""
    count = whole_number(name, value)
    if count < 1:
        raise SettingsError(f"{name}={count} must be at least 1")
    return count


def _growth(shape: ModelShape, settings: Settings, tokens: int, sequences: int) -> BudgetGrowth:
    most_tokens = shape.max_positions * max(sequences, _MOST_CONTEXTS)
    longest = settings.dram_budget.resolve(most_tokens * shape.token_bytes)
    memory = MemoryFacts.read()
    most = min(longest, memory.available_bytes)
    # Address space is reserved for it, and other things need some, too.
    if memory.address_bytes is not None:
        most = min(most, memory.address_bytes // 2)
    return BudgetGrowth(shape, settings, planned_tokens=tokens * sequences, most_bytes=most)


def _said() -> None:
    """Say nothing: the plan's warning did."""


def _warner(shape: ModelShape, settings: Settings) -> Callable[[], None]:
    segment = shape.layers * shadow_bytes(kernel_spec(shape, settings))
    return partial(_warn_of_streaming, segment)


def _warn_of_streaming(segment_bytes: int) -> None:
    warnings.warn(
        "half of the DRAM budget is left for rows, and the key shadow has outgrown the rest: from "
        f"here on, {format_bytes(segment_bytes)} more are read from the drive for every new token "
        "with every 1,024 tokens of context; raise dram_budget to keep them in memory, or say how "
        "long the context gets with new_cache(expected_tokens=...)",
        SetupWarning,
        stacklevel=2,
    )


# --- the engine ---

# How the names of all threads begin that runtimes start.
RUNTIME_THREADS = "hillinfer-"


@dataclass(frozen=True)
class Expectation:
    """How long a cache and its forks are said to get.

    Parameters
    ----------
    tokens
        Longest context, None where nobody knows.
    sequences
        Of different rows.
    from_start
        Tokens that it has from the start.
    """

    tokens: int | None = None
    sequences: int = 1
    from_start: int = 0

    @property
    def least_tokens(self) -> int:
        """Tokens that a sequence will have at least, as far as anyone knows."""
        return self.from_start if self.tokens is None else self.tokens


class CacheFamily:
    """A cache and its forks, of which statistics are told together.

    Parameters
    ----------
    expectation
        How long it is said to get.
    layers
        Layers of the model.
    """

    def __init__(self, expectation: Expectation, layers: int) -> None:
        self.expectation = expectation
        self.counters = Counters()
        self.hits = LayerHits(layers)
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        # One for each cache, one that is being opened too. Its methods are atomic without a lock.
        self._open: deque[None] = deque()

    @property
    def is_open(self) -> bool:
        """Whether any of its caches is neither closed nor dropped."""
        return bool(self._open)

    def add(self, batch: Batch) -> None:
        """Learn of one more cache's rows."""
        self._batches.add(batch)
        self._open.append(None)

    def await_one(self) -> None:
        """Learn that a cache is being opened, until `lose`; there is to be room for it already."""
        self._open.append(None)

    def lose(self) -> None:
        """Learn that one of the caches is closed or dropped; safe in any thread at any moment."""
        self._open.pop()

    def batches(self) -> list[Batch]:
        """Return the rows of every cache that is not freed."""
        return list(self._batches)


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
        self._before = Counters()
        self._hits_before = LayerHits(runtime.shape.layers)
        self.turns = Turns()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that made the engine."""
        return self._process != os.getpid()

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
            if len(families) > 1:
                self._make_room(families)
            self._families.add(family)
            self.runtime.expect(max(one.expectation.least_tokens for one in families))
        return family

    def resume(self, family: CacheFamily, saved: SavedSession, tokens: int) -> Sequence:
        """Return a sequence of the first tokens of a saved session, once it is this one's turn.

        Parameters
        ----------
        family
            Of the cache that is made of it.
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
        self.free_dropped()
        batch.clear()
        family.lose()
        self._members.pop()
        self._close_after_the_last()

    def drop(self, family: CacheFamily, batch: Batch) -> None:
        """Count a cache no more that nobody closed; safe in any thread at any moment.

        Its sequences are freed by `free_dropped`. After the last cache the runtime is closed
        instead: here, or where this is a runtime's thread, which would wait for itself, in a fresh
        one that the interpreter waits for at its exit.

        Parameters
        ----------
        family, batch
            That cache's, and its rows.
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
            self._dropped.popleft().clear()

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
        if threading.current_thread().name.startswith(RUNTIME_THREADS):
            threading.Thread(
                target=self.runtime.close, name=f"{RUNTIME_THREADS}close", daemon=False
            ).start()
        else:
            self.runtime.close()

    # --- what it has room for --------------------------------------------------------------

    def _make_room(self, families: list[CacheFamily]) -> None:
        runtime = self.runtime
        tokens, sequences = 0, 0
        for family in families:
            known = family.expectation
            held = [one.tokens for batch in family.batches() for one in batch.sequences()]
            tokens += max(sum(held), known.least_tokens * known.sequences)
            sequences += max(len(held), known.sequences)
        if runtime.follows_context:
            runtime.cover(tokens)
            return
        if any(family.expectation.tokens is None for family in families):
            runtime.limit_shadows(
                open_ended_shadow_limit(runtime.shape, runtime.settings, runtime.budget_bytes)
            )
            return
        each = -(-tokens // sequences)
        plan = BudgetPlan.for_context(runtime.shape, runtime.settings, each, sequences)
        try:
            plan.check()
        except BudgetError as error:
            raise BudgetError(
                f"{len(families)} caches of this model share one DRAM budget, and {tokens} tokens "
                f"in {sequences} sequences are expected of them together: {error}, or close a "
                "cache first"
            ) from error
        spec = kernel_spec(runtime.shape, runtime.settings)
        runtime.limit_shadows(plan.shadow_limit(spec, runtime.shape.layers, sequences))

    # --- what it did -----------------------------------------------------------------------

    def serve(self, family: CacheFamily) -> None:
        """Count for a family from here on, whose turn it is."""
        if self._served is not family:
            self._credit()
            self._served = family

    def statistics(self) -> CacheStatistics:
        """Return what all caches did together, closed ones too."""
        return self.runtime.statistics()

    def statistics_of(self, family: CacheFamily) -> CacheStatistics:
        """Return what a family did, in memory that all share."""
        self._credit()
        whole = self.runtime.statistics()
        sequences = {id(one): one for batch in family.batches() for one in batch.sequences()}
        return replace(
            whole,
            kv_bytes=self.runtime.kv_bytes(list(sequences.values())),
            layer_hit_rates=family.hits.rates(),
            **asdict(family.counters),
        )

    def _credit(self) -> None:
        """Add what was counted since to whoever was served."""
        if self._served is None:
            return
        counters, hits = self.runtime.counted()
        for one in fields(Counters):
            more = getattr(counters, one.name) - getattr(self._before, one.name)
            old = getattr(self._served.counters, one.name)
            setattr(self._served.counters, one.name, old + more)
        self._served.hits.add_since(hits, self._hits_before)
        self._before, self._hits_before = counters, hits
