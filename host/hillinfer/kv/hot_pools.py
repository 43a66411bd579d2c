# SPDX-License-Identifier: Apache-2.0
"""The hot pools of all layers, inside what the budget leaves, and what they are told of hits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import BudgetError, reason_of
from hillinfer.kv.hot_pool import (
    SLOT_BYTES,
    Candidates,
    Exchange,
    HotPool,
    PoolMoment,
    Promotions,
)
from hillinfer.kv.pool_policies import RANKED_BY_PYTHON, LayerShares, PoolPolicy, native_worth
from hillinfer.kv.sequence import Sequence
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.model_shape import ModelShape
from hillinfer.native.tables import HitRateTable
from hillinfer.system.kept_memory import give_free_memory_back
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Rows after which the heap is looked through.
_TRIMMED_ROWS = 16_384

# --- hits as pools are told of them ---

# Rounds of others' steps that a sequence's hits do not fade in, and rounds in which they then fade
# once. Of caches that take turns by single steps none fades.
_GRACE_ROUNDS = 1
_FADING_ROUNDS = 2


@dataclass(eq=False)
class _Told:
    """What a pool is told of a sequence: as `note` was given it, when, and faded how often."""

    of: ref[Sequence]
    settled: int = 0
    length: int = 0
    # Later where others were forgotten since.
    at: int = 0
    # Those of others since then, as many as there were when their number changed last.
    rounds: int = 0
    # As the pool knows its hits, below 0 where it knows others.
    fades: int = 0

    def rounds_of(self, others: int, clock: int) -> int:
        """Return the rounds of so many others until then; they never become fewer."""
        return max(self.rounds, (clock - self.at) // others) if others else self.rounds


class PendingHits:
    """Notes whose hits changed, and tells pools what they are once these are about to rank rows.

    To tell costs as much as looking at every hot row, and as long as all selected rows are hot
    nothing is ranked. Ranks are those of pools that are told at once.

    Hits of a sequence fade with its own steps. While others take steps and it takes none, the pool
    is told fewer of it: one of them that steps twice makes a round, and every second round fades
    them once. Its table keeps what it was, so its next step ranks by that. Of rows that sequences
    share the pool knows the hits of the one that was noted last.
    """

    most_fades: int = 40
    """How often hits fade beside what their own steps let fade; of any number 3 are left then."""

    def __init__(self, pools: list[HotPool]) -> None:
        self._pools = pools
        # Notes so far.
        self._clock = [0] * len(pools)
        # Tokens in full groups, context length, and clock of each sequence, the last noted at the
        # end.
        self._pending: list[dict[Sequence, tuple[int, int, int]]] = [{} for _ in pools]
        # The last noted at the end. Other threads may look at a list, so none is changed.
        self._known: list[list[_Told]] = [[] for _ in pools]

    def note(self, layer: int, sequence: Sequence, settled: int, length: int) -> None:
        """Note that a sequence's hits in a layer have changed.

        Parameters
        ----------
        layer, sequence
            Whose hits; they stay as they are until the next note, or pools are told first.
        settled, length
            Its tokens in full groups, and its context length N.
        """
        pending = self._pending[layer]
        self._clock[layer] += 1
        if next(reversed(pending), None) is not sequence:
            self._begin_turn(layer, sequence)
            # Of rows that several sequences share the pool knows what it was told last.
            pending.pop(sequence, None)
        pending[sequence] = settled, length, self._clock[layer]

    def forget(self, sequence: Sequence) -> None:
        """Let a sequence that is closed take part in nobody's rounds any more."""
        for layer, clock in enumerate(self._clock):
            self._end_turn(layer)
            self._pending[layer].pop(sequence, None)
            known, before = self._without(layer, sequence)
            for others, one in enumerate(reversed(known[:before]), len(known) - before):
                # Until now there were as many rounds as there were with it.
                rounds = (clock - one.at) // (others + 1)
                one.rounds, one.at = max(one.rounds, rounds), clock - rounds * others
            self._known[layer] = known

    def tell(self, layer: int) -> None:
        """Tell a layer's pool everything noted, in that order."""
        pending = self._pending[layer]
        if pending:
            self._end_turn(layer)
            self._pending[layer] = {}
            for sequence, one in self._changed(layer, pending):
                pool = self._pools[layer]
                pool.refresh(layer, sequence, one.settled, one.length, one.fades)

    def tell_of(self, layer: int, sequence: Sequence) -> None:
        """Do so before a sequence's hits or rows change in a way that is not noted."""
        for one in self._known[layer]:
            if one.of() is sequence:
                # Where others were noted since, its own may have faded.
                self.tell(layer)
                # What they become the pool hears when it is told of anybody.
                one.fades = -1

    def _changed(self, layer: int, noted: Container[Sequence]) -> list[tuple[Sequence, _Told]]:
        """Let hits fade while others take steps; return what the pool does not know, in order.

        That is of those noted, and of idle ones whose hits faded. Either may write to shared rows,
        which those that were noted later write to again.
        """
        alive = [(one.of(), one) for one in self._known[layer]]
        known = [(sequence, one) for sequence, one in alive if sequence is not None]
        is_fading = bool(self._pools[layer].policy.fade_shift)
        changed: list[tuple[Sequence, _Told]] = []
        for number, (sequence, one) in enumerate(known, 1):
            others = len(known) - number
            rounds = one.rounds_of(others, self._clock[layer]) * is_fading
            fades = min(max(0, rounds - _GRACE_ROUNDS) // _FADING_ROUNDS, self.most_fades)
            is_other, one.fades = fades != one.fades or sequence in noted, fades
            if is_other or any(sequence.shares_groups(before) for before, _ in changed):
                changed.append((sequence, one))
        return changed

    def _begin_turn(self, layer: int, sequence: Sequence) -> None:
        """Learn who is noted, where another one or nobody was since the pool was told."""
        self._end_turn(layer)
        known, before = self._without(layer, sequence)
        # From here on one more takes part in the rounds of those that it overtakes.
        for others, one in enumerate(reversed(known[before:])):
            one.rounds = one.rounds_of(others, self._clock[layer] - 1)
        self._known[layer] = [*known, _Told(ref(sequence), at=self._clock[layer])]

    def _end_turn(self, layer: int) -> None:
        """Learn what was noted last of who was noted last."""
        for one in self._known[layer][-1:]:
            sequence = one.of()
            if sequence is not None and sequence in self._pending[layer]:
                one.settled, one.length, one.at = self._pending[layer][sequence]

    def _without(self, layer: int, sequence: Sequence) -> tuple[list[_Told], int]:
        """Return who is known beside a sequence, and how many of them were noted before it."""
        known = [one for one in self._known[layer] if one.of() is not None]
        for number, one in enumerate(known):
            if one.of() is sequence:
                return known[:number] + known[number + 1 :], number
        return known, 0


# --- the pools of all layers ---

# Pools that must shrink give up this part of their slots beyond what is wanted.
_SPARE_PART = 64
# It takes no longer than to wake a thread to rank so many rows; only where all slots are taken they
# are ranked.
_QUICK_RANKED_ROWS = 32_768


class HotPools:
    """One hot pool per layer, giving way to whatever else M0 must hold.

    Promotion of many rows, or by a policy in Python, runs in a thread of its own, a layer at a
    time; `settle` waits for it. Few rows are promoted by whoever offers them.

    Parameters
    ----------
    policy
        Ranks rows.
    most_bytes
        Most that the budget may grow to, which address space is reserved for where the system
        lets it.

    Raises
    ------
    BudgetError
        Where not even what the budget holds now can be reserved.

    Attributes
    ----------
    tails_bytes
        Of the open groups of all sequences, which are counted as hot.
    quick_bytes
        Most bytes of rows that whoever offers them copies.
    promotions
        What is under way, to be waited for; begun and closed here.
    """

    # So few are copied sooner than another thread wakes, which would take Python's lock as well.
    quick_bytes = 128 << 10

    def __init__(
        self,
        shape: ModelShape,
        accountant: Accountant,
        policy: PoolPolicy,
        shares: LayerShares,
        recorder: Recorder = SILENT,
        most_bytes: int = 0,
    ) -> None:
        self._recorder = recorder
        self._shape, self._tail_bytes = shape, GROUP_TOKENS * shape.token_bytes
        self._accountant = accountant
        self._shares = shares
        self.tails_bytes = self._aside_bytes = 0
        self._covered_rows = 0
        # Slots of all layers since memory was short the last time.
        self._granted = sys.maxsize
        self._slot_bytes = shape.row_bytes + SLOT_BYTES
        least = self._slots_in_all()
        self._most_rows, self.layers = self._reserved(
            max(least, most_bytes // self._slot_bytes), least, policy
        )
        self.hits = PendingHits(self.layers)
        self._moments = [PoolMoment(0, 0, 1.0, 0, 0)] * shape.layers
        self.promotions = Promotions(shape.layers)
        # Held by whoever attends to rows in their slots, which must not move meanwhile. What moves
        # is waited for before it is taken: the thread that moves rows also calls observers of
        # earlier steps, and they may wait for it.
        self.attending = threading.RLock()
        accountant.on_shortage(self._make_room)

    def _reserved(self, most: int, least: int, policy: PoolPolicy) -> tuple[int, list[HotPool]]:
        """Return how many rows each layer's pool has address space for, and the pools.

        As much as there is: a system that never promises more memory than it has, or a limit on
        the process, may refuse what nobody would touch.
        """
        layers, row_bytes = self._shape.layers, self._shape.row_bytes
        while True:
            rows = int(most / layers * self._shares.largest)
            try:
                return rows, [HotPool(row_bytes, rows, policy) for _ in range(layers)]
            except OSError as error:
                if most <= least:
                    raise BudgetError(
                        f"this system does not let {format_bytes(most * self._slot_bytes)} of "
                        f"memory be reserved for hot rows ({reason_of(error)}): give a smaller "
                        "--dram-budget, or raise the limit (ulimit -v)"
                    ) from error
                most = max(least, most // 2)

    def capacity(self, layer: int) -> int:
        """Slots a layer may use now."""
        # An equal share of a multiple is whole, whatever division made of it.
        slots = int(self._slots_for_all() * self._shares.share(layer) + 1e-6)
        return min(slots, self._most_rows)

    def room(self, layer: int) -> int:
        """Slots that a layer may use and does not, and no row of any layer gives way for."""
        pool = self.layers[layer]
        spare = pool.columns.free + self._accountant.spare_bytes // self._slot_bytes
        return max(0, min(self.capacity(layer) - pool.used_rows, spare))

    def set_aside(self, byte_count: int) -> None:
        """Let so many bytes that are counted as hot hold something else than rows."""
        self._aside_bytes = byte_count

    def least_bytes(self, kept_tokens: int) -> int:
        """Return the bytes of the open groups and so many kept rows of every sequence."""
        sequences = self.tails_bytes // self._tail_bytes
        kept = kept_tokens * self._slot_bytes * self._shape.layers
        return self.tails_bytes + sequences * kept

    def wait(self) -> None:
        """Wait until all promotions are done, whatever became of them."""
        for layer in range(len(self.layers)):
            self.wait_for(layer)

    def cover(self, rows: int) -> None:
        """Make room in all tables for row numbers below `rows`.

        Raises BudgetError where M0 has no memory for one, MemoryError where the system has none.
        """
        if rows <= self._covered_rows:
            return
        grown = -(-rows // TABLE_GROWTH_ROWS) * TABLE_GROWTH_ROWS
        self.promotions.end()
        for pool in self.layers:
            # Some have grown where one did not.
            old = pool.slot_of_row.nbytes
            added = max(0, grown * pool.slot_of_row.itemsize - old)
            # While it moves the old one is there as well.
            with self._accountant.taking(Part.OTHER, added, old):
                pool.cover(grown)
        if grown // _TRIMMED_ROWS > self._covered_rows // _TRIMMED_ROWS:
            # What came and went with these rows has left holes.
            give_free_memory_back()
        self._covered_rows = grown

    def cover_hits(self, hits: HitRateTable, layer: int, tokens: int) -> None:
        """Make room in a hit-rate table for a layer's positions below `tokens`."""
        added = hits.growth_bytes(layer, tokens)
        if added:
            # While it moves the old one is there as well.
            old = hits.counts[layer].nbytes
            with self._accountant.taking(Part.OTHER, added, old):
                hits.cover(layer, tokens)

    def take_tail(self) -> None:
        """Count the open group of one more sequence; it lies beside the slots."""
        size = self._tail_bytes
        self.tails_bytes += size
        try:
            self._accountant.take(Part.HOT, size)
        except BaseException:
            self.tails_bytes -= size
            raise

    def give_tail(self) -> None:
        """Count one open group less."""
        size = self._tail_bytes
        self.tails_bytes -= size
        self._accountant.give(Part.HOT, size)

    def promote(
        self,
        layer: int,
        candidates: Candidates,
        moment: PoolMoment,
        settled_before: int,
        done: Callable[[tuple[int, int]], None],
    ) -> Exchange:
        """Promote rows of one layer (see HotPool.promote), in the background where they are many.

        Parameters
        ----------
        layer, candidates, moment, settled_before
            As there; the candidates' bytes must stay until it is done.
        done
            Called with the rows promoted and demoted, from the thread that moves them.
        """
        pool = self.layers[layer]

        def exchange() -> tuple[int, int]:
            with self._recorder.span(Lane.COPIES, "promote", layer=layer, rows=len(candidates)):
                moved = pool.promote(candidates, moment, settled_before)
            done(moved)
            return moved

        self.settle(layer)
        # Nobody makes room meanwhile: slots would move under whoever attends to them.
        with self.attending:
            self._moments[layer] = moment
            # The pool grows here, so that no other thread takes memory. How many slots are free
            # is known once nothing is under way.
            self.settle(layer)
            self.hits.tell(layer)
            grown = pool.growth(len(candidates), self.capacity(layer))
            if grown and self._take_slots(layer, grown * self._slot_bytes):
                pool.grow(grown)
            if self._is_quick(pool, candidates):
                return self.promotions.make(layer, exchange)
            return self.promotions.begin(layer, exchange)

    def settle(self, layer: int) -> None:
        """Wait until a layer's promotions are done; raise what went wrong, once."""
        # Every layer of every step asks, and as a rule nothing moves.
        if self.promotions.under_way[layer] or self.promotions.failure is not None:
            self.promotions.settle(layer)

    def is_still(self, layer: int) -> bool:
        """Say whether nothing is under way in a layer."""
        return all(one.done() for one in self.promotions.under_way[layer])

    def wait_for(self, layer: int) -> None:
        """Wait until what is under way in a layer is done; see `Promotions.wait_for`."""
        if self.promotions.under_way[layer]:
            self.promotions.wait_for(layer)

    def redistribute(self, misses: NDArray[np.int64]) -> None:
        """Divide the memory anew after so many cold rows were wanted in each layer."""
        self._shares.note_misses(misses)
        self._shrink(range(len(self.layers)))

    def forget_group(self, group: int) -> None:
        """Drop a group's rows from all layers."""
        self.promotions.end()
        for pool in self.layers:
            pool.forget(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)

    def close(self) -> None:
        """Stop the background thread; nothing is under way afterwards."""
        self.promotions.close()

    def _is_quick(self, pool: HotPool, candidates: Candidates) -> bool:
        """Say whether to promote takes no longer than to have another thread do it."""
        is_little = len(candidates) * self._shape.row_bytes <= self.quick_bytes
        is_little &= len(candidates) <= pool.columns.free or pool.used_rows <= _QUICK_RANKED_ROWS
        return is_little and native_worth(pool.policy) != RANKED_BY_PYTHON

    def _slots_in_all(self) -> int:
        others = self.tails_bytes + self._aside_bytes
        left = self._accountant.bytes_for_hot_rows - others
        return max(0, left // self._slot_bytes)

    def _take_slots(self, layer: int, byte_count: int) -> bool:
        """Count a layer's new slots; others give way for them, but never its own."""
        if self._accountant.take_spare(Part.HOT, byte_count):
            return True
        self._shrink([other for other in range(len(self.layers)) if other != layer])
        return self._accountant.take_spare(Part.HOT, byte_count)

    def _make_room(self) -> None:
        """Shrink below what is left, by a little more than was wanted.

        While a prompt is read every layer's shadow takes memory in turn, and to rank the rows of
        all pools for each of them would cost more than to make the shadows.
        """
        left = self._slots_in_all()
        self._granted = left - self._spare(left)
        self._shrink(range(len(self.layers)))

    def _slots_for_all(self) -> int:
        left = self._slots_in_all()
        if left >= self._granted + 2 * self._spare(left):
            # Much was given back since.
            self._granted = sys.maxsize
        return min(left, self._granted)

    def _spare(self, slots: int) -> int:
        layers = self._shape.layers
        return slots // (_SPARE_PART * layers) * layers

    def _shrink(self, layers: Iterable[int]) -> None:
        """Let layers give back what they hold beyond their capacity."""
        self.promotions.end()
        with self.attending:
            self.promotions.end()
            for layer in layers:
                pool = self.layers[layer]
                before, capacity = pool.used_rows, self.capacity(layer)
                if capacity < before:
                    self.hits.tell(layer)
                    pool.shrink(capacity, self._moments[layer])
                self._accountant.give(Part.HOT, (before - pool.used_rows) * self._slot_bytes)
