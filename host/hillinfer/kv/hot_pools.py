# SPDX-License-Identifier: Apache-2.0
"""The hot pools of all layers, inside what the budget leaves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import BudgetError, reason_of
from hillinfer.kv.hot_pool import SLOT_BYTES, Candidates, HotPool, PendingHits, PoolMoment
from hillinfer.kv.pool_policies import RANKED_BY_PYTHON, PoolPolicy, native_worth
from hillinfer.kv.sequence import HitRateTable
from hillinfer.memory_budget import TABLE_GROWTH_ROWS, Accountant, Part
from hillinfer.model_shape import ModelShape
from hillinfer.settings import PoolSizes
from hillinfer.system.kept_memory import give_free_memory_back
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer.values import format_bytes
from hillinfer_model.kernel_spec import GROUP_TOKENS

# Rows after which the heap is looked through.
_TRIMMED_ROWS = 16_384

# --- How the memory for hot rows is divided among layers ---


class LayerShares:
    """The share of each layer, equal at first."""

    # Half of the memory is divided equally, so that no layer starves while it happens to hit.
    _EQUAL_PART = 0.5
    _MOST = 3.0
    # How much of what was known before still counts.
    _MEMORY = 0.5

    def __init__(self, layers: int, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._misses = np.zeros(layers)
        self._shares = np.full(layers, 1 / layers)

    @property
    def largest(self) -> float:
        """The largest share there can be, as a multiple of an equal one."""
        return self._MOST if self.sizes is PoolSizes.MISSES else 1.0

    def share(self, layer: int) -> float:
        """Return a layer's share of all slots, 1 in all."""
        return float(self._shares[layer])

    def note_misses(self, misses: NDArray[np.int64]) -> None:
        """Learn how many cold rows each layer wanted since the last time, int64 (layers,)."""
        if self.sizes is PoolSizes.EQUAL:
            return
        self._misses = self._MEMORY * self._misses + misses
        total = float(self._misses.sum())
        layers = len(self._misses)
        by_misses = self._misses / total if total else np.full(layers, 1 / layers)
        shares = self._EQUAL_PART / layers + (1 - self._EQUAL_PART) * by_misses
        most = min(self._MOST / layers, 1.0)
        shares = np.minimum(shares, most)
        # What was cut off goes to the others, as far as each is from the most.
        room = most - shares
        left = 1 - float(shares.sum())
        self._shares = shares + room * (left / float(room.sum()) if left > 0 else 0)


# --- the pools of all layers ---

# Pools that must shrink give up this part of their slots beyond what is wanted.
_SPARE_PART = 64
# It takes no longer than to wake a thread to rank so many rows; only where all slots are taken they
# are ranked.
_QUICK_RANKED_ROWS = 32_768
Exchange = Future[tuple[int, int]]


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
        self._background = ThreadPoolExecutor(1, thread_name_prefix="hillinfer-pool")
        self._under_way: list[list[Exchange]] = [[] for _ in range(shape.layers)]
        self._failure: BaseException | None = None
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
        """Make room in all tables for row numbers below `rows`."""
        if rows <= self._covered_rows:
            return
        grown = -(-rows // TABLE_GROWTH_ROWS) * TABLE_GROWTH_ROWS
        added = (grown - self._covered_rows) * np.dtype(np.int32).itemsize
        # While one of them moves the old one is there as well.
        old = self._covered_rows * np.dtype(np.int32).itemsize
        self._accountant.take(Part.OTHER, added * self._shape.layers + old)
        self._wait()
        for pool in self.layers:
            pool.cover(grown)
        self._accountant.give(Part.OTHER, old)
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
            self._accountant.take(Part.OTHER, added + old)
            hits.cover(layer, tokens)
            self._accountant.give(Part.OTHER, old)

    def take_hits(self, hits: HitRateTable) -> None:
        """Count one more hit-rate table like this, for a fork."""
        self._accountant.take(Part.OTHER, hits.byte_count)

    def give_hits(self, hits: HitRateTable) -> None:
        """Count a hit-rate table as freed."""
        self._accountant.give(Part.OTHER, hits.byte_count)

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
                under_way = _made(exchange)
            else:
                under_way = self._background.submit(exchange)
            # What went wrong is told by the next who settles, whoever moved rows.
            self._under_way[layer].append(under_way)
        return under_way

    def settle(self, layer: int) -> None:
        """Wait until a layer's promotions are done; raise what went wrong, once."""
        if self._under_way[layer]:
            self._wait_for(layer)
        if self._failure is not None:
            self._raise_failure()

    def wait_for(self, layer: int) -> None:
        """Wait until what is under way in a layer is done; what went wrong is left for `settle`.

        For a thread that only looks.
        """
        for exchange in list(self._under_way[layer]):
            # Not `wait` of the library, which waits for ever for one that `close` cancelled.
            with suppress(CancelledError):
                exchange.exception()

    def is_still(self, layer: int) -> bool:
        """Say whether nothing is under way in a layer."""
        return all(one.done() for one in self._under_way[layer])

    def finish(self) -> None:
        """Wait until whatever the background thread was given is done, noted here or not.

        For a thread that was interrupted while it began a promotion.
        """
        # Closed, nothing is under way.
        with suppress(CancelledError, RuntimeError):
            self._background.submit(int).exception()

    def when_settled(self, layer: int, done: Callable[[], None]) -> None:
        """Call `done` from the background thread after what is under way in a layer.

        What it raises there, the next `settle` raises.
        """

        def settled(exchange: Exchange) -> None:
            # A future only logs what its callbacks raise.
            try:
                done()
            except BaseException as error:
                self._failure = self._failure or error

        if self._under_way[layer]:
            # Also called where `close` cancels it.
            self._under_way[layer][-1].add_done_callback(settled)
        else:
            done()

    def settle_all(self) -> None:
        """Wait until all promotions are done; raise what went wrong, once."""
        self._wait()
        self._raise_failure()

    def redistribute(self, misses: NDArray[np.int64]) -> None:
        """Divide the memory anew after so many cold rows were wanted in each layer."""
        self._shares.note_misses(misses)
        self._shrink(range(len(self.layers)))

    def forget_group(self, group: int) -> None:
        """Drop a group's rows from all layers."""
        self._wait()
        for pool in self.layers:
            pool.forget(group * GROUP_TOKENS, (group + 1) * GROUP_TOKENS)

    def close(self) -> None:
        """Stop the background thread; nothing is under way afterwards."""
        self._background.shutdown(cancel_futures=True)
        self._under_way = [[] for _ in self.layers]

    def _is_quick(self, pool: HotPool, candidates: Candidates) -> bool:
        """Say whether to promote takes no longer than to have another thread do it."""
        is_little = len(candidates) * self._shape.row_bytes <= self.quick_bytes
        is_little &= len(candidates) <= pool.columns.free or pool.used_rows <= _QUICK_RANKED_ROWS
        return is_little and native_worth(pool.policy) != RANKED_BY_PYTHON

    def _slots_in_all(self) -> int:
        others = self.tails_bytes + self._aside_bytes
        left = self._accountant.bytes_for_hot_rows - others
        return max(0, left // self._slot_bytes)

    def _wait(self) -> None:
        # Whoever gives groups or memory up must not stop half-way, so what went wrong waits for
        # the next who settles.
        for layer in range(len(self.layers)):
            self._wait_for(layer)

    def _wait_for(self, layer: int) -> None:
        # Two threads may wait for the same ones, and neither goes on before they are done.
        for exchange in list(self._under_way[layer]):
            with suppress(CancelledError):
                failure = exchange.exception()
                self._failure = self._failure or failure
            with suppress(ValueError):
                self._under_way[layer].remove(exchange)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

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
        self._wait()
        with self.attending:
            self._wait()
            for layer in layers:
                pool = self.layers[layer]
                before, capacity = pool.used_rows, self.capacity(layer)
                if capacity < before:
                    self.hits.tell(layer)
                    pool.shrink(capacity, self._moments[layer])
                self._accountant.give(Part.HOT, (before - pool.used_rows) * self._slot_bytes)


def _made(exchange: Callable[[], tuple[int, int]]) -> Exchange:
    """Return a promotion that the calling thread makes at once; errors are kept."""
    made: Exchange = Future()
    try:
        made.set_result(exchange())
    except Exception as error:
        made.set_exception(error)
    return made
