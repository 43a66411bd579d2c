# SPDX-License-Identifier: Apache-2.0
"""A decode step of one layer in one native call, over tables that are kept between steps."""

from __future__ import annotations

import ctypes
import math
import time
from functools import partial

import numpy as np
import torch

from hillinfer.attention.native import NativeAttention
from hillinfer.engine.cold_rows import ColdRows
from hillinfer.engine.queries import ChoiceAhead, explained, may_choose_aside
from hillinfer.engine.selection import Ahead, Sets, TokenSelection
from hillinfer.kv.gather import Gather
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_keeper import LayerStepLog
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import NUMBER_TYPES, Sequence
from hillinfer.kv.shadow_keeper import ShadowKeeper
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.native.coming import ComingAttention, MissList
from hillinfer.native.library import native_library
from hillinfer.native.selected_rows import SelectedRows
from hillinfer.native.structures import DecodeStep, Shape
from hillinfer.scoring.arguments import query_factor
from hillinfer.scoring.scorer import ImportanceEvaluation, Wanted
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, LayerStep, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

_NOT_COUNTED = -1  # Hits are counted in Python.
# After a step with cold rows it is looked for so many steps what is to be read.
STEPS_AFTER_COLD = 16


class AskedStep:
    """What layers of one step are asked for alike, and what it is filled in for (`of`).

    That is the tokens that are stored, how many the sequence has beside them, and the scaling.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.address = ctypes.addressof(step)
        self.of: tuple[int, int, float] | None = None
        self.count = 0

    def tell(self, of: tuple[int, int, float], coming: int, wanted: Wanted, exact: int = 0) -> None:
        """Fill in how much is to be chosen, how much of it is exact, and with which factors."""
        # After an interrupt in between it is filled in for nothing.
        step, before, self.of = self.step, self.of, None
        if before is None or before[2] != of[2]:
            self.tell_scaling(of[2])
        step.coming = coming
        step.sinks, step.recent, step.count = wanted.sinks, wanted.recent, wanted.count
        step.threads, step.exact = torch.get_num_threads(), exact
        self.of, self.count = of, wanted.count

    def tell_scaling(self, scaling: float) -> None:
        """Fill in the factors alone."""
        self.step.scaling, self.step.factor = scaling, query_factor(scaling)


class LayerCalls:
    """Tells the library of queries, and the pools and their policy of what it found.

    Attributes
    ----------
    aside_from
        The first step from which on rows are thought to be hot again.
    """

    def __init__(
        self,
        shape: ModelShape,
        spec: KernelSpec,
        scope: Scope,
        pools: HotPools,
        policy: PoolPolicy,
    ) -> None:
        self._shape = shape
        self._spec = spec
        self._scope = scope
        self._pools = pools
        self._policy = policy
        self._query_shape = shape.query_heads, 1, shape.head_dim
        # A policy that counts in a way of its own does it in Python.
        is_common = type(policy).tally is PoolPolicy.tally
        self._shift = policy.fade_shift if is_common else _NOT_COUNTED
        self.aside_from = 0

    def asked(self) -> AskedStep:
        """Return what a kind of call asks for: another thread may still look at another kind's."""
        shape = self._shape
        return AskedStep(
            DecodeStep(
                shape=Shape.of(self._spec, self._scope),
                group_size=shape.group_size,
                stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
                fade_shift=self._shift,
            )
        )

    def tell_query(self, step: DecodeStep, query: torch.Tensor) -> bool:
        """Say where a query lies; False where the library cannot read it, or others refuse it."""
        number_type, strides = NUMBER_TYPES.get(query.dtype), query.stride()
        if number_type is None or query.shape != self._query_shape or not query.is_cpu:
            return False
        if strides[2] != 1:
            return False
        step.query, step.head_stride, step.query_type = query.data_ptr(), strides[0], number_type
        return True

    def settle(self, layer: int, sequence: Sequence, length: int) -> None:
        """Wait until no row of a layer moves, and have room to count hits.

        Not with `attending` held: rows may move behind an observer that waits for it.
        """
        self._pools.settle(layer)
        if length > len(sequence.hits.counts[layer]):
            self._pools.cover_hits(sequence.hits, layer, length)

    def note_hits(
        self, layer: int, sequence: Sequence, selected: SelectedRows, misses: MissList
    ) -> None:
        """Note that what is selected was counted, or count it: each row once."""
        length = sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        if self._shift == _NOT_COUNTED:
            counts = sequence.hits.counts[layer]
            self._policy.tally(counts, selected.rows)
            misses.recount(counts)

    def note_cold(self, step: int) -> None:
        """Note that rows were cold in a step."""
        self.aside_from = step + STEPS_AFTER_COLD


# --- The step ---


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
    """

    def __init__(
        self,
        attention: NativeAttention,
        spec: KernelSpec,
        scope: Scope,
        evaluation: ImportanceEvaluation,
        selection: TokenSelection,
        shadow: ShadowKeeper,
        pools: HotPools,
        gather: Gather,
        cold: ColdRows,
        calls: LayerCalls,
        log: LayerStepLog,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._library = native_library()
        self._evaluation = evaluation
        self._selection = selection
        self._shadow = shadow
        self._pools = pools
        self._gather = gather
        self._cold = cold
        self._counters = counters
        self._log = log
        self._recorder = recorder
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
        self._rows, self._rows_address = asked.step, asked.address
        self._segment_tokens, self._newest_step = spec.segment_tokens, 0
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
        asked = length, sequence.lacking, scaling
        if both.of != asked and not self._prepare(asked):
            return None
        if sequence.observed[layer] is not None or not self._calls.tell_query(both.step, query):
            return None
        out, count = torch.empty(self._query_shape), both.count
        entry: LayerStep | None = None
        try:
            with self._selection.scoring:
                own = self._shadow.described(layer, sequence, length)
                if own is None:
                    return None
                both.step.step = step
                self._calls.settle(layer, sequence, length)
                with self._pools.attending:
                    started = time.perf_counter_ns()
                    is_hot = self._library.decode(
                        "hillinfer_decode_step",
                        self._number,
                        sequence.table_addresses[layer],
                        self._pools.layers[layer].table_address,
                        both.address,
                        *self._places,
                        out.data_ptr(),
                    )
                    own.coded_tokens = sequence.tables.coded[layer]
                    self._calls.note_hits(layer, sequence, self._selected, self._misses)
                    if not is_hot:
                        self._coming.begin(both.address, self._selected, out.data_ptr())
                        entry = self._cold.attend(
                            layer, sequence, step, None, self._misses, self._coming
                        )
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

    def choose_next(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float
    ) -> Ahead | ChoiceAhead | None:
        """Choose for the token that is about to come to a layer, and begin to read what is cold.

        Where nothing is to be read a thread of the native library's chooses while the layer before
        computes.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        query, scaling
            As in `step`; the query is a predicted one.

        Returns
        -------
        Sets of int64 positions, ascending, the coming token's the last of each, and what lands of
        them, or who chooses them; None, and nothing is done, where the choice is not one that the
        native library makes over its tables.

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
        if not self._calls.tell_query(ahead.step, query):
            return None
        try:
            with self._selection.scoring:
                own = self._shadow.described(layer, sequence, past)
                if own is None:
                    return None
                started = time.perf_counter_ns()
                if self._may_choose_aside(layer, past):
                    held = [one.layers[layer].shadow for one in sequence.segments]
                    sets = np.empty((self._sets, ahead.count), np.int64)
                    choice = ChoiceAhead(self._library, layer, sequence, sets, None, own, held)
                    choice.begin(self._choosing_number, ahead.address)
                    return choice
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

    def _prepare(self, asked: tuple[int, int, float]) -> bool:
        """Ask for the step of a token in all layers; False where one call is not to choose it."""
        length, lacking, scaling = asked
        # Where both compute alike one call does both.
        if self._choosing_number != self._number or not math.isfinite(scaling):
            return False
        wanted, both = self._evaluation.wanted(length, lacking), self._both
        if wanted.count == length or self._evaluation.codes(length, lacking):
            return False
        wanted.check(length, 0)
        self._selection.make_room(length)
        both.tell(asked, 0, wanted)
        if both.count > self._room or length > self._longest:
            self._make_room(both.count, length)
        return True

    def _make_room(self, count: int, tokens: int) -> None:
        """Have room for sets of so many positions, of so many tokens."""
        self._room, self._longest = 2 * count, 2 * tokens
        self._selected = SelectedRows(self._sets, self._room, self._longest)
        self._misses = MissList(self._selected.most_rows)
        self._places = self._selected.address, self._misses.address

    def _may_choose_aside(self, layer: int, past: int) -> bool:
        """Say whether another thread may choose of a layer's rows, all hot as far as is known."""
        return (
            self._ahead.step.threads > 1
            and not self._is_recorded
            and self._newest_step >= self._calls.aside_from
            and may_choose_aside(past, self._segment_tokens)
            and self._pools.layers[layer].used_rows >= past & -GROUP_TOKENS
        )

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
