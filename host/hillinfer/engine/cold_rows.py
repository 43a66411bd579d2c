# SPDX-License-Identifier: Apache-2.0
"""What a step selects and is on the drive alone: rows landed and promoted, shadows weighed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.landing import LandingTable, RowBuffers, WantedRows
from hillinfer.engine.coded_call import SplitAhead, SplitCall
from hillinfer.engine.queries import explained, host_query
from hillinfer.kv.cold_store import ColdStore
from hillinfer.kv.gather import tile_runs
from hillinfer.kv.hot_pool import Candidates
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import PoolManager, SelectedLife
from hillinfer.kv.prefetch_buffer import LandedRows, PrefetchBuffer
from hillinfer.kv.sequence import Sequence
from hillinfer.native.library import native_library
from hillinfer.native.selected import Coming, ComingAttention, MissedRows, MissList
from hillinfer.native.split import SplitRows
from hillinfer.native.structures import row_addresses
from hillinfer.scoring.coded import AlignedWeights
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.values import ValueCodes
from hillinfer.trace.recorder import Lane, LayerStep, Recorder
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec


class ColdRows:
    """Has the native library attend to a selection while what is missing of it comes.

    Parameters
    ----------
    store, pools
        Where full groups lie.
    manager
        Promotes rows that were read.
    prefetch
        Has read some ahead.
    buffers
        Where rows go that are read on demand.
    """

    def __init__(
        self,
        store: ColdStore,
        pools: HotPools,
        manager: PoolManager,
        prefetch: PrefetchBuffer,
        buffers: RowBuffers,
    ) -> None:
        self._store = store
        self._pools = pools
        self._manager = manager
        self._prefetch = prefetch
        self._buffers = buffers
        self._library = native_library()
        self._tile_rows = self._library.tile_rows

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        step: int,
        landed: LandedRows | None,
        misses: MissList,
        attention: ComingAttention,
        look: Callable[[], object] | None = None,
    ) -> LayerStep:
        """Read what a selection misses while the library attends to it, and promote it.

        The pools' `attending` is held.

        Parameters
        ----------
        layer, sequence
            Whose rows.
        step
            The decode step.
        landed
            What of them `land` has read ahead; given up here.
        misses
            Has, or gets, what is missing.
        attention
            Has begun; it goes on with the runs.
        look
            Finds rows, lists misses and attends where all rows are here, once what was read ahead
            is; None where that was done, and nothing was read ahead.

        Returns
        -------
        What was read, for the log.
        """
        entry = LayerStep(step, layer, sequence.lengths[layer])
        with SelectedLife(self._prefetch, landed, self._pools, entry, misses) as life:
            if look is not None:
                life.arrive_by(look)
            self._note_missed(life, entry, sequence, misses, attention.rows)
            if misses.count > misses.arrived:
                self._demand(entry, sequence, misses, attention)
        return entry

    @property
    def most_exact(self) -> int:
        """How many exact rows stay where they are read: the gather buffers, less what is coded."""
        return self._buffers.rows + self._buffers.rows // 2

    def bring(
        self,
        layer: int,
        sequence: Sequence,
        step: int,
        landed: LandedRows | None,
        split: SplitRows,
        coming: SplitCall,
        look: Callable[[], bool] | None,
    ) -> LayerStep:
        """Read what exact and coded tokens miss, have them attended to, and promote exact rows.

        The pools' `attending` is held.

        Parameters
        ----------
        layer, sequence, step, landed
            As in `attend`.
        split
            The tokens.
        coming
            Who attends to them.
        look
            `coming` looks once what was read ahead is there, or is on its way as rows or codes;
            None where it has looked, no row was read ahead, and something is to be read.

        Returns
        -------
        What was read, for the log.
        """
        entry, misses = LayerStep(step, layer, sequence.lengths[layer]), split.misses
        with SelectedLife(self._prefetch, landed, self._pools, entry, misses) as life:
            is_here = False
            if look is not None:
                is_here = life.arrive_by(look)
                entry.wait_seconds += coming.waited_seconds
            self._note_missed(life, entry, sequence, misses, split.exact.count)
            if not is_here:
                started = time.perf_counter()
                self._buffers.settle()
                self._store.turns.demand()
                try:
                    coming.expect()
                    is_here = self._land_all(entry, sequence, split, coming)
                    if not is_here:
                        used = self._demand_exact(entry, sequence, split, coming.together)
                        self._demand_codes(entry, split, coming, used)
                finally:
                    self._store.turns.satisfy()
                if not is_here:
                    entry.wait_seconds += time.perf_counter() - started
                    coming.end()
        return entry

    def _land_all(
        self, entry: LayerStep, sequence: Sequence, split: SplitRows, coming: SplitCall
    ) -> bool:
        """Have one call read all that is missing and attend to it.

        False where it does not: what else is done reads all of it, and says what is wrong.
        """
        misses, layer, store = split.misses, entry.layer, self._store
        engine = store.engine.in_library
        if engine is None:
            return False
        part = misses.part(misses.arrived, misses.count)
        _, rows = split.cold
        memory, first = self._buffers.take_both(), len(part.rows)
        places = np.arange(first + len(rows))
        if len(places) > len(memory):
            return False
        sets = [
            WantedRows(layer, part.rows, memory, places[:first]),
            WantedRows(layer, rows, memory, places[first:]),
        ]
        tables: list[LandingTable | None] = []
        for one in sets:
            store.settle(layer, one.groups)
            own = store.own_rows(one) if len(one.rows) else None
            if own is None and len(one.rows):
                return False
            tables.append(None if own is None else LandingTable(own))
        call = coming.land(part.numbers, *tables)
        if call is None:
            return False
        if len(places):
            read = partial(engine.land_by, store.files[layer], tables, call)
            outcome = store.turns.on_demand(read)
        else:
            outcome = call(None)
        if not self._library.are_here("hillinfer_land_split", outcome):
            return False
        entry.wait_seconds += coming.waited_seconds
        for one, table, times in zip(sets, tables, coming.times, strict=True):
            if table is not None:
                entry.note_reads(store.landed_by(one, table.landed, times))
        if first:
            offered = _candidates(part, memory, sets[0].places)
            self._buffers.lend_both(self._manager.offer_missed(entry, sequence, offered))
        return True

    def _note_missed(
        self,
        life: SelectedLife,
        entry: LayerStep,
        sequence: Sequence,
        misses: MissList,
        rows: int,
    ) -> None:
        """Note which of so many rows were cold, and promote those of them that were read ahead."""
        entry.cold_rows = misses.count
        entry.hot_rows = rows - entry.cold_rows
        if misses.arrived:
            own = _candidates(misses.part(0, misses.arrived), self._prefetch.rows)
            life.promote(self._manager.offer_missed(entry, sequence, own))

    def _demand_exact(
        self,
        entry: LayerStep,
        sequence: Sequence,
        split: SplitRows,
        together: NDArray[np.uint8],
    ) -> int:
        """Read exact rows that were not read ahead, and leave them where all can be looked at.

        Returns how many rows of the buffers somebody looks at.
        """
        misses, most = split.misses, self.most_exact
        first, stop = misses.arrived, misses.count
        addresses = split.exact.addresses
        for start in range(first, stop, most):
            part = misses.part(start, min(start + most, stop))
            places, memory = np.arange(len(part.rows)), self._buffers.take_both()
            entry.note_reads(
                self._store.read_rows(WantedRows(entry.layer, part.rows, memory, places))
            )
            # One read's rows stay in the buffers.
            lies = memory
            if stop - first > most:
                lies = together[start - first : start - first + len(places)]
                lies[:] = memory[: len(places)]
            addresses[part.numbers] = row_addresses(lies, places)
            offered = self._manager.offer_missed(entry, sequence, _candidates(part, memory, places))
            self._buffers.lend_both(offered)
        return stop - first if stop - first <= most else 0

    def _demand_codes(
        self, entry: LayerStep, split: SplitRows, coming: SplitCall, used: int
    ) -> None:
        """Read rows of tokens without codes in a file, and have these coded; then take the codes.

        In this order: codes are read meanwhile.
        """
        self._demand_coded(entry, split, coming, used)
        if coming.fill():
            self._demand_coded(entry, split, coming, used)

    def _demand_coded(
        self, entry: LayerStep, split: SplitRows, coming: SplitCall, used: int
    ) -> None:
        _, rows = split.cold
        if not len(rows):
            return
        memory = self._buffers.behind(used) if used else self._buffers.take_both()
        for start in range(0, len(rows), len(memory)):
            own = rows[start : start + len(memory)]
            places = np.arange(len(own))
            entry.note_reads(self._store.read_rows(WantedRows(entry.layer, own, memory, places)))
            coming.code(start, row_addresses(memory, places))

    def _demand(
        self,
        entry: LayerStep,
        sequence: Sequence,
        misses: MissList,
        attention: ComingAttention,
    ) -> None:
        """Read misses that were not read ahead; one run holds as many as a buffer does."""
        self._buffers.settle()
        rest = misses.part(misses.arrived, misses.count)
        most = self._buffers.rows
        # Between the reads of one set nothing is read ahead.
        self._store.turns.demand()
        try:
            taken = 0
            for turn, (start, stop, own) in enumerate(
                tile_runs(attention.rows, rest.numbers, self._tile_rows, most)
            ):
                part = misses.part(misses.arrived + taken, misses.arrived + taken + len(own))
                taken += len(own)
                started, attended = time.perf_counter(), attention.seconds
                addresses, places = attention.run(start, stop), part.places - part.places[:1]
                if len(own):
                    buffer = self._buffers.take(turn % 2, len(own))
                    coming = Coming(attention, addresses, part.numbers - start)
                    wanted = WantedRows(entry.layer, part.rows, buffer, places, coming)
                    entry.note_reads(self._store.read_rows(wanted))
                attention.end()
                attended = attention.seconds - attended
                entry.wait_seconds += time.perf_counter() - started - attended
                if len(own):
                    candidates = _candidates(part, buffer, places)
                    offered = self._manager.offer_missed(entry, sequence, candidates)
                    self._buffers.lend(turn % 2, offered)
        finally:
            self._store.turns.satisfy()


# --- Before its turn ---


class ReadsAhead:
    """Begins to read what is cold of exact and coded tokens that are chosen before their turn.

    Any thread may ask.

    Parameters
    ----------
    values, file
        Keep codes; the file is None where none is.
    pools
        Have hot rows.
    prefetch
        Reads rows.
    spec
        Of the shadows.

    Attributes
    ----------
    has_begun
        Whether reads of codes were begun since whoever drops those set it back.
    """

    def __init__(
        self,
        values: ValueCodes,
        file: CodeFile | None,
        pools: HotPools,
        prefetch: PrefetchBuffer,
        spec: KernelSpec,
    ) -> None:
        self._values, self._file = values, file
        self._pools, self._prefetch = pools, prefetch
        self._segment_tokens = spec.segment_tokens
        self._library = native_library()
        self.has_begun = False

    def begin(
        self,
        layer: int,
        sequence: Sequence,
        past: int,
        split: SplitRows,
        choice: int | None = None,
    ) -> SplitAhead:
        """Begin to read what is cold of a split.

        Parameters
        ----------
        layer, sequence, past
            Whose, and tokens of it that are stored.
        split
            The tokens, once they are chosen.
        choice
            Where the library finds what it is to end before, as `AsideChoice` says; None where no
            thread of its own chooses them.

        Raises
        ------
        NonFiniteQueryError
            Where the query was not finite that they are chosen by.
        """
        split.tell_values(sequence.known_words(layer).words)
        self._pools.wait_for(layer)
        table, hot = sequence.table_addresses[layer], self._pools.layers[layer]
        # It stays while the library looks, whoever has it grow meanwhile.
        kept = hot.slot_of_row
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        rest = self._segment_tokens, past + 1, past & -GROUP_TOKENS, split.address
        name, pool = "hillinfer_list_cold", hot.table_address

        def listed(slots: int) -> bool:
            return self._library.decode(name, choice, table, pool, slots, *rest)

        is_here = self._values.look(layer, listed)
        del kept
        landed = None if is_here else self.cold(layer, sequence, split)
        return SplitAhead(landed, split)

    def cold(self, layer: int, sequence: Sequence, split: SplitRows) -> LandedRows | None:
        """Begin to read codes that lie in a file, and rows of what else a split lists as cold."""
        positions, rows = split.cold
        if self._file is not None:
            self.has_begun = True
            stay = ~self._file.begin(layer, id(sequence), rows, split.cold_numbers)
            positions, rows = positions[stay], rows[stay]
        return self._prefetch.begin(layer, positions, rows)


def _candidates(
    missed: MissedRows, source: NDArray[np.uint8], places: NDArray[np.int64] | None = None
) -> Candidates:
    own = missed.places if places is None else places
    return Candidates(missed.rows, missed.positions, missed.hits, source, own)


# --- Weights of shadows elsewhere ---


class Weighing:
    """Computes L' where the library does not find key codes in its tables.

    Parameters
    ----------
    weights
        Computes it.
    recorder
        Notes how long that takes.

    Attributes
    ----------
    weights
        As given.
    """

    def __init__(self, weights: AlignedWeights, recorder: Recorder) -> None:
        self.weights = weights
        self._recorder = recorder

    def tell(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        split: SplitRows,
        shadows: Callable[[], list[SegmentShadow]],
    ) -> None:
        """Tell a split what its coded tokens weigh; see `SplitRows.tell_weights`.

        Parameters
        ----------
        layer
            Which one.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        split
            The tokens.
        shadows
            Brings the layer's shadows.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        both = zip(*split.in_place, strict=True)
        coded = [np.setdiff1d(*one, assume_unique=True) for one in both]
        try:
            scaled = self.weights.scaled(host_query(query), scaling)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        with self._recorder.span(Lane.HOST_SCORING, "weigh", layer=layer):
            found = self.weights.of_each(scaled, shadows(), coded)
        split.tell_weights([(one.aligned, one.invalid) for one in found])
