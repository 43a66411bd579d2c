# SPDX-License-Identifier: Apache-2.0
"""A decode step of several sequences in one layer in one native call, each as it is alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection

import numpy as np
import torch

from hillinfer.attention.kernels import NativeAttention
from hillinfer.engine.coded_call import JoinedPart
from hillinfer.engine.coded_step import CodedStep
from hillinfer.engine.cold_rows import ColdRows
from hillinfer.engine.queries import (
    STEPS_AFTER_COLD,
    AnnouncedLayer,
    LayerCalls,
    Prediction,
    Sets,
    explained,
    readable_states,
    row_states,
)
from hillinfer.engine.selection import TokenSelection
from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import LayerStepLog
from hillinfer.kv.pool_policies import PoolPolicy
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant
from hillinfer.model_shape import StoredType
from hillinfer.native.library import native_library
from hillinfer.native.selected import ComingAttention
from hillinfer.native.signatures import RowStates, StepRow, StepRows
from hillinfer.native.split import SelectedRoom, SplitRoom
from hillinfer.native.structures import Shape
from hillinfer.scoring.arguments import query_factor
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.shadow.segments import SegmentLayer
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

# For so many steps after M0 had no room for caches that take them together.
STEPS_REFUSED = 64


class JoinedStep:
    """Stores, chooses and attends for the sequences of a joined batch, a row in each thread.

    It is for rows of one new token each that the native library chooses and attends for over its
    tables, as `NativeDecode` and `CodedStep` have it do for one. Tokens of a predicted query are
    chosen when the layer's turn comes: where all rows are hot nothing is to be read before. Of
    rows some of whose selected tokens are coded, and rows that have none, the more are taken.

    Parameters
    ----------
    attention
        Says what is in a row, and with which instructions it is attended to.
    spec, scope
        Of the scoring contract.
    evaluation, selection, shadow
        Who chooses, codes and knows where shadows lie.
    pools, cold
        Where rows lie, and who has those attended to that are cold.
    calls
        Says what all calls for a layer are told.
    log
        Takes what was read in each layer and step.
    counters
        Where tokens are counted.
    read_on
        Ends what is being chosen of layers that come next; see `PrefetchPipeline`.
    accountant
        Counts memory that the library chooses in.
    coded
        Has codes of values, and attends to a row that misses some; None where no token is coded.

    Attributes
    ----------
    parts
        Of the step under way; to be looked at, and empty outside of one.
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
        cold: ColdRows,
        calls: LayerCalls,
        log: LayerStepLog,
        counters: Counters,
        read_on: Callable[[], None],
        accountant: Accountant,
        coded: CodedStep | None = None,
    ) -> None:
        self._library, self._coded = native_library(), coded
        self._evaluation, self._selection, self._shadow = evaluation, selection, shadow
        self._pools, self._cold, self._log = pools, cold, log
        self._counters, self._read_on = counters, read_on
        shape = attention.shape
        is_bfloat16 = shape.stored_type is StoredType.BFLOAT16
        # What becomes a row by itself, as in `SequenceManager.append_token`.
        self._stored = {torch.bfloat16} if is_bfloat16 else {torch.float16, torch.float32}
        self._heads = Shape(kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self._head_numbers = shape.query_heads * shape.head_dim
        self._sets = 1 if scope is Scope.LAYER else spec.kv_heads
        self._described = calls.asked().step
        self._asked = StepRows(variant=attention.variant.number)
        self._refused_until = 0
        self._coming = ComingAttention(
            attention.variant.number, attention.state_bytes, shape.row_bytes
        )
        self._table = (StepRow * 0)()
        self._accountant = accountant
        self._memory: list[SelectedRoom] = []
        self._rooms: list[SplitRoom] = []
        self.parts: list[JoinedPart] = []
        self._ahead: dict[int, AnnouncedLayer] = {}
        self._scaling: float | None = None
        self._observe: Callable[[int, int, Sets], None] | None = None
        # The newest step, and the first from which on rows are thought to be hot again.
        self._step = self._hot_from = 0
        self._full_rows = 0

    @staticmethod
    def is_for(
        attention: NativeAttention,
        evaluation: ImportanceEvaluation,
        policy: PoolPolicy,
        recorder: Recorder,
    ) -> bool:
        """Say whether the library does all of it: chooses, attends and counts hits, unobserved."""
        is_common = type(policy).tally is PoolPolicy.tally
        is_native = evaluation.table_variant is attention.variant
        return is_native and is_common and policy.fade_shift >= 0 and recorder is SILENT

    # --- a step ----------------------------------------------------------------------------

    def begin(
        self,
        rows: Collection[tuple[int, Sequence]],
        step: int,
        observe: Callable[[int, int, Sets], None] | None,
    ) -> list[int]:
        """Begin a step in which sequences get a token each.

        Parameters
        ----------
        rows
            Of the batch, with the sequence of each.
        step
            Its number.
        observe
            Called with layer, length and sets of every selection that is attended to.

        Returns
        -------
        The batch rows that are taken in; the others go on by themselves. None are where M0 has no
        room for what is chosen for them.
        """
        self.forget()
        kinds = {row: self._has_codes(one) for row, one in rows}
        of_each = [
            [(row, one) for row, one in rows if kinds[row] is kind] for kind in (False, True)
        ]
        taken = max(of_each, key=len)
        if len(taken) < 2 or step < self._refused_until:
            return []
        if len(self._table) != len(taken):
            self._table = (StepRow * len(taken))()
        self._step, self._observe, self._scaling = step, observe, None
        try:
            for number, (row, sequence) in enumerate(taken):
                self.parts.append(self._part(number, row, sequence))
        except BudgetError:
            # To ask has hot rows and codes given up, so it is not asked for again at once.
            self._refused_until = step + STEPS_REFUSED
            self.forget()
            return []
        self._full_rows = sum(one.past & -GROUP_TOKENS for one in self.parts)
        asked = self._asked
        asked.rows, asked.count = ctypes.addressof(self._table), len(taken)
        asked.threads = torch.get_num_threads()
        self._selection.expect(max(one.past for one in self.parts) + 1)
        return [one.row for one in self.parts]

    def forget(self) -> None:
        """Forget the step, which is through or broke off."""
        self.parts, self._ahead = [], {}

    def takes_numbers(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Say whether the library makes rows of keys and values as the model made them."""
        if keys.dtype not in self._stored or values.dtype is not keys.dtype or not keys.is_cpu:
            return False
        return keys.stride(3) == values.stride(3) == 1

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store every part's row of a layer.

        Parameters
        ----------
        layer
            Index of the decoder layer.
        keys, values
            (batch, kv_heads, 1, head_dim), of which `takes_numbers` says so.
        """
        self._asked.layer = layer
        overflows = np.empty(len(self.parts), np.int64)
        self._library.tables.hillinfer_store_rows(
            self._asked,
            self._heads,
            row_states(keys),
            row_states(values),
            overflows.ctypes.data,
        )
        if overflows.any():
            for one, count in zip(self.parts, overflows.tolist(), strict=True):
                for counters in (self._counters, one.sequence.counters):
                    counters.fp16_overflows += count

    def announce(self, layer: int, query: torch.Tensor | Prediction, scaling: float) -> set[int]:
        """Take predicted queries of a layer, to choose by when its turn comes.

        Parameters
        ----------
        layer
            Where one token more is coming to every sequence.
        query
            (batch, query_heads, 1, head_dim), or what computes it: in the layer's turn.
        scaling
            Factor on inner products.

        Returns
        -------
        The batch rows that are to be announced, and to attend, by themselves.
        """
        alone = {one.row for one in self.parts}
        ahead = self._ahead[layer] = AnnouncedLayer(query, scaling, [])
        # Where something may have to be read it is chosen now, and read while the layer before
        # computes.
        is_hot = self._step >= self._hot_from and math.isfinite(scaling)
        if not is_hot or self._pools.layers[layer].used_rows < self._full_rows:
            ahead.segments = [None] * len(self.parts)
            return alone
        with self._selection.scoring:
            for one in self.parts:
                last = self._last_segment(layer, one.sequence, one.past)
                ahead.segments.append(last)
                if last is not None:
                    alone.remove(one.row)
                    ahead.held.extend([own.layers[layer].shadow for own in one.sequence.segments])
        return alone

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> set[int]:
        """Choose and attend for every part whose row was just stored.

        Parameters
        ----------
        layer
            Index of the decoder layer.
        query
            (batch, query_heads, 1, head_dim).
        scaling
            Factor on inner products.
        out
            float32 (batch, 1, query_heads, head_dim), contiguous; gets the output of each part.

        Returns
        -------
        The batch rows that are to attend by themselves.

        Raises
        ------
        CacheUseError
            Where a query is not finite.
        """
        query, ahead = readable_states(query), self._ahead.pop(layer, None)
        if not math.isfinite(scaling) and ahead is None:
            return {one.row for one in self.parts}
        # Tables are not described while somebody chooses by them.
        self._read_on()
        self._settle(layer)
        if scaling != self._scaling:
            self._scale(scaling)
        asked = self._asked
        asked.layer, asked.out, asked.query = layer, out.data_ptr(), row_states(query)
        asked.predicted = RowStates()
        if ahead is not None:
            predicted = readable_states(ahead.query)
            asked.predicted = row_states(predicted)
            asked.predicted_factor = query_factor(ahead.scaling)
        with self._selection.scoring:
            segments = self._last_segments(layer, ahead)
            alone = set()
            for own, part, last in zip(self._table, self.parts, segments, strict=True):
                own.is_left_out = last is None
                if last is None:
                    alone.add(part.row)
            if len(alone) == len(self.parts):
                return alone
            cold: list[JoinedPart] = []
            with self._pools.attending:
                self._call(layer)
                for own, part, last in zip(self._table, self.parts, segments, strict=True):
                    if last is not None:
                        last.coded_tokens = part.sequence.tables.coded[layer]
                        if part.split is None:
                            self._end(layer, part, own, out)
                        elif not self._end_split(layer, part, own):
                            cold.append(part)
        for part in cold:
            self._attend_cold(layer, part, query, scaling, out)
        return alone

    # --- inside ----------------------------------------------------------------------------

    def _has_codes(self, sequence: Sequence) -> bool | None:
        """Say whether some of what a sequence's next token selects is coded.

        None where it is not chosen for over its tables in every layer: its group neither begins nor
        becomes full with the token.
        """
        past, lacking = sequence.tokens, sequence.lacking
        if sequence.deeper or not 0 < past % GROUP_TOKENS < GROUP_TOKENS - 1:
            return None
        if self._evaluation.codes(past + 1, lacking):
            return None if self._coded is None else True
        return False if self._evaluation.wanted(past + 1, lacking).count <= past else None

    def _part(self, number: int, row: int, sequence: Sequence) -> JoinedPart:
        """Have memory for what a sequence's token selects, and tell its row of the table."""
        past, lacking = sequence.tokens, sequence.lacking
        own, exact_count = self._table[number], 0
        if self._coded is not None and self._has_codes(sequence):
            wanted, exact = self._evaluation.wanted_split(past + 1, lacking)
            for one in (wanted, exact):
                one.check(past + 1, 0)
            if number == len(self._rooms):
                self._rooms.append(self._coded.room())
            split = self._rooms[number].take(wanted.count, exact.count, past + 1)
            part = JoinedPart(row, sequence, past, split.exact, split.misses, split)
            own.split, exact_count = split.address, exact.count
        else:
            wanted = self._evaluation.wanted(past + 1, lacking)
            wanted.check(past + 1, 0)
            if number == len(self._memory):
                self._memory.append(SelectedRoom(self._sets, self._accountant))
            selected, misses = self._memory[number].take(wanted.count, past + 1)
            part = JoinedPart(row, sequence, past, selected, misses)
            own.selected, own.split = selected.address, None
        own.tables, own.row, own.misses = sequence.table_addresses[0], row, part.misses.address
        own.step = self._described
        asked = own.step
        asked.sinks, asked.recent, asked.count = wanted.sinks, wanted.recent, wanted.count
        asked.step, asked.exact = self._step, exact_count
        return part

    def _scale(self, scaling: float) -> None:
        factor = query_factor(scaling)
        for own in self._table:
            own.step.scaling, own.step.factor = scaling, factor
        self._scaling = scaling

    def _last_segments(self, layer: int, ahead: AnnouncedLayer | None) -> list[SegmentLayer | None]:
        """Describe every part's shadow; None for one that attends by itself."""
        now = [
            self._last_segment(layer, one.sequence, one.past + 1)
            if ahead is None or one.split is not None
            else None
            for one in self.parts
        ]
        if ahead is None:
            return now
        # What is coded is weighed over the tables of its own turn, too.
        return [
            announced if one.split is None or own is not None else None
            for one, own, announced in zip(self.parts, now, ahead.segments, strict=True)
        ]

    def _last_segment(self, layer: int, sequence: Sequence, stop: int) -> SegmentLayer | None:
        """Describe a sequence's shadow; None where the library does not choose over it."""
        if sequence.observed[layer] is not None:
            return None
        return self._shadow.described(layer, sequence, stop)

    def _settle(self, layer: int) -> None:
        """Wait until no row of a layer moves, and have room to count hits."""
        self._pools.settle(layer)
        for one in self.parts:
            hits = one.sequence.hits
            if one.past >= len(hits.counts[layer]):
                self._pools.cover_hits(hits, layer, one.past + 1)

    def _call(self, layer: int) -> None:
        """Have the library choose and attend for the rows that are not left out."""
        asked, pool = self._asked, self._pools.layers[layer].table_address
        if self._coded is None or self.parts[0].split is None:
            self._library.call("hillinfer_attend_rows", asked, pool)
            return

        def attend(slots: int) -> bool:
            self._library.call("hillinfer_attend_split_rows", asked, pool, slots)
            return True

        splits = [(one.sequence, one.split) for one in self.parts if one.split is not None]
        self._coded.look(layer, splits, attend)

    def _is_hot(self, layer: int, own: StepRow) -> bool:
        """Say whether a row's output is there; CacheUseError where its query is not finite."""
        outcome = int(own.outcome)
        try:
            return not outcome or self._library.are_here("hillinfer_attend_rows", outcome)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error

    def _count(self, layer: int, part: JoinedPart, selected: int, sets: Callable[[], Sets]) -> None:
        """Count so many tokens of a set as selected, and show them to whoever observes."""
        length = part.past + 1
        for counters in (self._counters, part.sequence.counters):
            counters.scored_tokens += length * self._sets
            counters.selected_tokens += selected * self._sets
        if self._observe is not None:
            self._observe(layer, length, sets())

    def _end_split(self, layer: int, part: JoinedPart, own: StepRow) -> bool:
        """Count what a part's token selected; False where it is to be attended to by itself."""
        sequence, length, split = part.sequence, part.past + 1, part.split
        assert split is not None
        assert self._coded is not None
        is_hot = self._is_hot(layer, own)
        self._count(layer, part, int(split.table.set_rows), lambda: split.sets)
        if not is_hot:
            return False
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        self._coded.cover(split)
        counts = self._coded.count(sequence, split)
        self._log.end_hot(layer, sequence, self._step, split.exact.count, counts)
        return True

    def _attend_cold(
        self, layer: int, part: JoinedPart, query: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        """Attend to what was chosen for a part, of which something is to be read."""
        assert part.split is not None
        assert self._coded is not None
        self._hot_from = self._step + STEPS_AFTER_COLD
        sets, exact = part.split.sets, part.split.exact_sets
        given = layer, part.sequence, query[part.row], sets, scaling, self._step, None, exact
        out[part.row, 0] = self._coded.attend(*given)[:, 0]

    def _end(self, layer: int, part: JoinedPart, own: StepRow, out: torch.Tensor) -> None:
        """Count what a part's token selected, and attend to what of it is cold."""
        sequence, length, table = part.sequence, part.past + 1, part.selected.table
        is_hot = self._is_hot(layer, own)
        self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
        self._count(
            layer,
            part,
            int(table.set_rows),
            lambda: list(
                part.selected.sets[: self._sets * table.set_rows].copy().reshape(self._sets, -1)
            ),
        )
        if is_hot:
            self._log.end_hot(layer, sequence, self._step, table.count)
            return
        self._hot_from = self._step + STEPS_AFTER_COLD
        step = ctypes.addressof(own) + StepRow.step.offset
        place = out.data_ptr() + part.row * self._head_numbers * out.element_size()
        self._coming.begin(step, part.selected, place)
        entry = self._cold.attend(layer, sequence, self._step, None, part.misses, self._coming)
        self._log.end(entry, sequence)
