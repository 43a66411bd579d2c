# SPDX-License-Identifier: Apache-2.0
"""A decode step of one layer in one native call, over tables that are kept between steps."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from hillinfer.attention.kernels import NativeAttention
from hillinfer.engine.cold_rows import ColdRows
from hillinfer.engine.queries import (
    Ahead,
    AsideChoice,
    GivenQuery,
    KeptQuery,
    LayerCalls,
    Prediction,
    Sets,
    explained,
    host_query,
)
from hillinfer.engine.selection import TokenSelection
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import LayerStepLog
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.native.library import native_library
from hillinfer.native.selected import ComingAttention, MissList, SelectedRows
from hillinfer.native.structures import DecodeStep
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, LayerStep, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec


class NativeDecode:
    """Chooses tokens, finds their rows and attends to them, for one new token on the processor.

    Where all rows are hot, or were read ahead, one call does it. Where others are cold it lists
    them, and a second one attends to all rows while those land.

    Parameters
    ----------
    attention
        Says what is in a row, and with which instructions it is attended to.
    spec, scope
        Of the scoring contract.
    evaluation, selection, shadow
        Who chooses, codes and knows where shadows lie.
    pools, gather, cold
        Where rows lie, who reads them ahead, and who has those attended to that are cold.
    calls
        Tell the library of queries.
    log
        Takes what was read in each layer and step.
    counters
        Where tokens are counted.
    recorder
        Notes how long the parts take.

    Attributes
    ----------
    kept
        Predicted queries by layer and the sequence's id, until the layer's turn.
    """

    def __init__(
        self,
        attention: NativeAttention,
        spec: KernelSpec,
        scope: Scope,
        evaluation: ImportanceEvaluation,
        selection: TokenSelection,
        shadow: SequenceShadows,
        pools: HotPools,
        gather: Gather,
        cold: ColdRows,
        calls: LayerCalls,
        log: LayerStepLog,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._library = native_library()
        # A call through it takes a microsecond more, at every layer and step.
        self._functions = self._library.functions
        self._evaluation = evaluation
        self._selection, self._shadow = selection, shadow
        self._pools = pools
        self._gather = gather
        self._cold = cold
        self._counters = counters
        self._log, self._recorder = log, recorder
        self._is_recorded = recorder is not SILENT
        shape = attention.shape
        self._query_shape = shape.query_heads, 1, shape.head_dim
        self._sets = 1 if scope is Scope.LAYER else spec.kv_heads
        choosing = evaluation.table_variant
        self._number = attention.variant.number
        self._choosing_number = None if choosing is None else choosing.number
        self._calls = calls
        # One for each kind of call, and what all layers of a step have in common is told once.
        self._both, self._ahead, asked = calls.asked(), calls.asked(), calls.asked()
        self._before = calls.asked()
        self.kept: dict[tuple[int, int], KeptQuery] = {}
        # Whether another thread writes to the memory of the selected sets.
        self._is_choosing = False
        self._rows, self._rows_address = asked.step, asked.address
        self._newest_step = self._room = self._longest = 0
        self._make_room(0, 0)
        self._coming = ComingAttention(self._number, attention.state_bytes, shape.row_bytes)

    @property
    def chosen(self) -> Sets:
        """The sets that the last `step` chose."""
        selected = self._selected
        own = selected.sets[: self._sets * selected.table.set_rows].copy()
        return list(own.reshape(self._sets, -1))

    def step(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float, step: int
    ) -> torch.Tensor | None:
        """Choose for a token that was just appended, and attend to what is chosen.

        Parameters
        ----------
        layer, sequence
            Where.
        query
            (query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        step
            The current step.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type; None, and nothing is done, where the choice
        is not one that the native library makes over its tables.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        length, both = sequence.lengths[layer], self._both
        kept = self.kept.get((layer, id(sequence))) if self.kept else None
        asked = length, sequence.lacking, scaling
        if both.of != asked:
            if kept is None and not self._chooses(asked):
                return None
            self._prepare(asked)
        if kept is None and sequence.observed[layer] is not None:
            return None
        asking = query
        if not self._calls.tell_query(both.step, query):
            if kept is None:
                return None
            asking = host_query(query)[:, None].contiguous()
            self._calls.tell_query(both.step, asking)
        out, count = torch.empty(self._query_shape), both.count
        decode, ahead = self._functions.hillinfer_decode_step, tuple[int, ...]()
        asking_for: tuple[int, ...] = (both.address,)
        # One that failed, or could not begin, is over: the library has nothing to wait for.
        if kept is not None and kept.choice is not None and kept.choice.is_under_way:
            decode = self._functions.hillinfer_attend_chosen
            ahead = (kept.choice.address,)
        elif kept is not None:
            self._tell_before(kept.asked)
            product = kept.query.before_positions()
            kept.told = self._calls.tell_prediction(self._before.step, kept.query, product)
            decode = self._functions.hillinfer_decode_predicted
            asking_for = self._before.address, both.address
        entry: LayerStep | None = None
        try:
            with self._selection.scoring:
                own = self._shadow.described(layer, sequence, length) if kept is None else kept.own
                if own is None:
                    return None
                both.step.step = self._newest_step = step
                self._calls.settle(layer, sequence, length)
                with self._pools.attending:
                    started = time.perf_counter_ns()
                    outcome = decode(
                        *ahead,
                        self._number,
                        sequence.table_addresses[layer],
                        self._pools.layers[layer].table_address,
                        *asking_for,
                        *self._places,
                        out.data_ptr(),
                    )
                    is_hot = not outcome or self._library.are_here("decoding", outcome)
                    own.coded_tokens = sequence.tables.coded[layer]
                    if kept is not None:
                        self._is_choosing = self._is_choosing and not ahead
                        del self.kept[layer, id(sequence)]
                    self._calls.note_hits(layer, sequence, self._selected, self._misses)
                    if not is_hot:
                        self._coming.begin(both.address, self._selected, out.data_ptr())
                        entry = self._cold.attend(
                            layer, sequence, step, None, self._misses, self._coming
                        )
                        self._calls.note_cold(step)
            for counters in (self._counters, sequence.counters):
                counters.scored_tokens += length * self._sets
                counters.selected_tokens += count * self._sets
            if self._is_recorded:
                started = self._note_chosen(both.step, layer, length, started)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        self._end(layer, sequence, step, entry, started)
        return out if query.dtype is torch.float32 else out.to(query.dtype)

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: Sets,
        scaling: float,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor | None:
        """Attend to selected rows and let those that were cold become hot.

        Parameters
        ----------
        layer, sequence, query, scaling, step
            As in `step`.
        sets
            Ascending int64 positions: one set for the layer, or one per KV head.
        landed
            What of their cold rows was read ahead, or None.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type; None, and nothing is done, where this is
        not for the native library: it attends to a part of all tokens and on the processor.
        """
        count, length, asked = len(sets[0]), sequence.lengths[layer], self._rows
        self._newest_step = step
        if not 0 < count < length or not math.isfinite(scaling):
            return None
        # One set for whatever shares one, all of the same length.
        is_even = len(sets) == self._sets and all(len(one) == count for one in sets)
        if not is_even or not self._calls.tell_query(asked, query):
            return None
        out = torch.empty(self._query_shape)
        asked.scaling, asked.threads, asked.step = scaling, torch.get_num_threads(), step
        entry: LayerStep | None = None
        if count > self._room or length > self._longest:
            self._make_room(count, length)
        self._selected.table.set_rows = count
        np.concatenate(sets, out=self._selected.sets[: self._sets * count])

        decode = partial(
            self._library.decode,
            "hillinfer_attend_tokens",
            self._number,
            sequence.table_addresses[layer],
            self._pools.layers[layer].table_address,
            self._rows_address,
            *self._places,
            out.data_ptr(),
        )

        def look() -> None:
            decode()
            if self._misses.is_looked_for:
                self._calls.note_hits(layer, sequence, self._selected, self._misses)

        self._calls.settle(layer, sequence, length)
        with self._pools.attending:
            started = time.perf_counter_ns()
            is_hot = False
            if landed is None:
                is_hot = decode()
                self._calls.note_hits(layer, sequence, self._selected, self._misses)
            if not is_hot:
                # What was read ahead is to be given back also where it is not wanted any more.
                self._coming.begin(self._rows_address, self._selected, out.data_ptr())
                given = layer, sequence, step, landed, self._misses, self._coming
                entry = self._cold.attend(*given, None if landed is None else look)
                if entry.cold_rows:
                    self._calls.note_cold(step)
        self._end(layer, sequence, step, entry, started)
        return out if query.dtype is torch.float32 else out.to(query.dtype)

    def keep(
        self, layer: int, sequence: Sequence, query: torch.Tensor | Prediction, scaling: float
    ) -> bool:
        """Keep a predicted query until `begin` or `step`; False where it is to be used now.

        Where nothing is to be read before, its product is made beside the true query's, which has
        just brought the weights. Parameters as in `choose_next`, and a query may be what computes
        it as the only one of its batch.
        """
        past, lacking, before = sequence.lengths[layer], sequence.lacking, self._before
        if sequence.told is not None:
            return False
        asked = past, lacking, scaling
        if before.of != asked:
            # No group begins or becomes full with the token: tables describe what they did before.
            is_inside = 0 < past % GROUP_TOKENS < GROUP_TOKENS - 1
            is_alike = self._choosing_number == self._number and math.isfinite(scaling)
            if self._is_recorded or not (is_inside and is_alike):
                return False
            wanted = self._evaluation.wanted(past + 1, lacking)
            if wanted.count > past or self._evaluation.codes(past + 1, lacking):
                return False
            if not self._selection.is_quick(layer, sequence):
                return False
            wanted.check(past + 1, 1)
            self._selection.make_room(past)
            before.tell(asked, 1, wanted)
        if (
            sequence.observed[layer] is not None
            or self._newest_step < self._calls.aside_from
            or self._pools.layers[layer].table.used < past & -GROUP_TOKENS
        ):
            return False
        with self._selection.scoring:
            own = self._shadow.described(layer, sequence, past)
            if own is None:
                return False
            held = [one.layers[layer].shadow for one in sequence.segments]
        if isinstance(query, torch.Tensor):
            query = GivenQuery(query)
        self.kept[layer, id(sequence)] = KeptQuery(asked, query, own, held)
        return True

    def begin(self, layer: int, sequence: Sequence) -> None:
        """Have another thread choose by a query that was kept, if there is one, until `step`."""
        kept, before = self.kept.get((layer, id(sequence))), self._before
        if kept is None or before.step.threads < 2 or self._is_choosing:
            return
        self._tell_before(kept.asked)
        if before.count > self._room or sequence.lengths[layer] >= self._longest:
            self._make_room(before.count, sequence.lengths[layer] + 1)
        product = kept.query.before_positions()
        kept.told = self._calls.tell_prediction(before.step, kept.query, product)
        self._is_choosing = True
        # Noted first: an interrupt must not leave a thread that nobody ends.
        kept.choice = AsideChoice()
        kept.choice.begin(
            self._number,
            sequence.table_addresses[layer],
            kept.asked[0],
            before.address,
            int(self._selected.table.sets),
            None,
        )

    def forget(self) -> None:
        """Forget predicted queries that nobody asked for, because the pass broke off."""
        for kept in self.kept.values():
            if kept.choice is not None:
                with suppress(Exception):
                    kept.choice.end()
        self.kept.clear()
        self._is_choosing = False

    def choose_next(
        self, layer: int, sequence: Sequence, query: torch.Tensor | Prediction, scaling: float
    ) -> Ahead | None:
        """Choose for the token that is about to come to a layer, and begin to read what is cold.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        query, scaling
            As in `step`; the query is a predicted one, or what computes it as the only one of its
            batch.

        Returns
        -------
        Sets of int64 positions, ascending, the coming token's the last of each, and what lands of
        them; None, and nothing is done, where the choice is not one that the native library makes
        over its tables.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        past, ahead = sequence.lengths[layer], self._ahead
        if self._choosing_number is None or sequence.observed[layer] is not None:
            return None
        if self._evaluation.codes(past + 1, sequence.lacking):
            return None
        asked = past, sequence.lacking, scaling
        if ahead.of != asked:
            if not math.isfinite(scaling):
                return None
            self._selection.make_room(past)
            wanted = self._evaluation.wanted(past + 1, sequence.lacking)
            wanted.check(past + 1, 1)
            ahead.tell(asked, 1, wanted)
        told = self._calls.tell_coming(ahead.step, query)
        if told is None:
            return None
        try:
            with self._selection.scoring:
                own = self._shadow.described(layer, sequence, past)
                if own is None:
                    return None
                started = time.perf_counter_ns()
                if ahead.count > self._room or past >= self._longest:
                    self._make_room(ahead.count, past + 1)
                # While rows of the layer move nobody may look where they are.
                is_still = self._pools.is_still(layer)
                is_hot = self._library.decode(
                    "hillinfer_choose_tokens",
                    self._choosing_number,
                    sequence.table_addresses[layer],
                    self._pools.layers[layer].table_address if is_still else None,
                    ahead.address,
                    self._selected.address,
                )
                own.coded_tokens = sequence.tables.coded[layer]
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        if self._is_recorded:
            self._note_chosen(ahead.step, layer, past, started)
        chosen = self.chosen
        if is_hot and is_still:
            return Ahead(chosen, None, None)
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        stored, on_drive = self._selected.rows[:-1], past & -GROUP_TOKENS
        return Ahead(chosen, self._gather.land(layer, sequence, stored, on_drive), None)

    # --- inside ----------------------------------------------------------------------------

    def _chooses(self, asked: tuple[int, int, float]) -> bool:
        """Say whether one call is to choose and attend for a token: both compute alike."""
        length, lacking, scaling = asked
        if self._choosing_number != self._number or not math.isfinite(scaling):
            return False
        wanted = self._evaluation.wanted(length, lacking)
        return wanted.count < length and not self._evaluation.codes(length, lacking)

    def _prepare(self, asked: tuple[int, int, float]) -> None:
        """Ask for the step of a token in all layers."""
        length, lacking, _ = asked
        (wanted := self._evaluation.wanted(length, lacking)).check(length, 0)
        self._selection.make_room(length)
        # First: what is asked for already is not looked at again.
        if wanted.count > self._room or length > self._longest:
            self._make_room(wanted.count, length)
        self._both.tell(asked, 0, wanted)

    def _tell_before(self, asked: tuple[int, int, float]) -> None:
        """Ask once more for the choice of a token, for another sequence than the last time."""
        if self._before.of != asked:
            past, lacking, _ = asked
            self._before.tell(asked, 1, self._evaluation.wanted(past + 1, lacking))

    def _make_room(self, count: int, tokens: int) -> None:
        """Have room for sets of so many positions, of so many tokens; it never becomes less."""
        room, longest = max(self._room, 2 * count), max(self._longest, 2 * tokens)
        selected = SelectedRows(self._sets, room, longest)
        misses = MissList(selected.most_rows)
        self._selected, self._misses = selected, misses
        self._places = selected.address, misses.address
        # Last: the library writes as much as there is said to be room for.
        self._room, self._longest = room, longest

    def _end(
        self,
        layer: int,
        sequence: Sequence,
        step: int,
        entry: LayerStep | None,
        started: int,
    ) -> None:
        """Log rows of a layer that were all hot, or what was read of them."""
        if self._is_recorded:
            stop = time.perf_counter_ns()
            self._recorder.note(Lane.COMPUTE, "attention", started, stop, layer=layer)
        if entry is None:
            self._log.end_hot(layer, sequence, step, self._selected.table.count)
        else:
            self._log.end(entry, sequence)

    def _note_chosen(self, step: DecodeStep, layer: int, tokens: int, started: int) -> int:
        """Note how long coding and choosing took; return when the latter ended."""
        coded, chosen = int(step.coded_at), int(step.chosen_at)
        self._recorder.note(Lane.HOST_SCORING, "code", started, coded, layer=layer)
        self._recorder.note(Lane.HOST_SCORING, "score", coded, chosen, layer=layer, tokens=tokens)
        return chosen
