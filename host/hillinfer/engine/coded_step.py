# SPDX-License-Identifier: Apache-2.0
"""One new token attends to exact rows and coded tokens (contract, sections 14 to 16)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import kept_product_bytes, most_coded, weight_bytes
from hillinfer.engine.coded_call import ChoiceAhead, SplitAhead, SplitCall, SplitPool
from hillinfer.engine.cold_rows import ColdRows, ReadsAhead, Weighing
from hillinfer.engine.queries import (
    AskedStep,
    LayerCalls,
    Prediction,
    Sets,
    explained,
    host_query,
    may_choose_aside,
)
from hillinfer.engine.selection import TokenSelection
from hillinfer.kv.hot_pools import HotPools
from hillinfer.kv.pool_manager import LayerStepLog
from hillinfer.kv.prefetch_buffer import LandedRows, PrefetchBuffer
from hillinfer.kv.sequence import Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.memory_budget import Accountant
from hillinfer.native.library import native_library
from hillinfer.native.split import CountedMemory, ReusedRows, SplitRoom, SplitRows
from hillinfer.native.structures import address_of
from hillinfer.scoring.coded import AlignedWeights
from hillinfer.scoring.scorer import ImportanceEvaluation
from hillinfer.shadow.code_file import CodeFile
from hillinfer.shadow.segments import ValueWords
from hillinfer.shadow.values import ValueCodes
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, LayerStep, Recorder
from hillinfer_model.errors import NonFiniteQueryError
from hillinfer_model.kernel_spec import GROUP_TOKENS


class CodedStep:
    """Brings exact rows and value codes of a layer's selected tokens together and attends to them.

    Exact rows come as all rows do, and become hot. Codes of values lie in DRAM, or are made of rows
    that are read for that and then forgotten. Keys of coded tokens are their L'. Where all is here,
    or was read ahead, one call of the library does it, and a second one where something is read.

    Parameters
    ----------
    weights
        Computes L' where the library does not find key codes in its tables.
    values, file
        Keep value codes; the file is None where none is.
    evaluation, selection, shadow
        Who chooses, who else uses shadows meanwhile, and who knows where they lie.
    pools, prefetch, cold
        Where rows lie, who reads them ahead, and who brings those that are cold.
    calls
        Tell the library of queries.
    log
        Takes what was read in each layer and step.
    row_bytes
        Of a row.
    accountant
        Counts memory that a step works in.
    counters
        Where tokens are counted.
    recorder
        Notes how long the parts take.
    """

    def __init__(
        self,
        weights: AlignedWeights,
        values: ValueCodes,
        file: CodeFile | None,
        evaluation: ImportanceEvaluation,
        selection: TokenSelection,
        shadow: SequenceShadows,
        pools: HotPools,
        prefetch: PrefetchBuffer,
        cold: ColdRows,
        calls: LayerCalls,
        log: LayerStepLog,
        row_bytes: int,
        accountant: Accountant,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._weighing = Weighing(weights, recorder)
        self._values, self._file = values, file
        self._evaluation, self._selection, self._shadow = evaluation, selection, shadow
        self._pools, self._prefetch, self._cold, self._calls = pools, prefetch, cold, calls
        self._log, self._accountant, self._counters = log, accountant, counters
        self._recorder = recorder
        self._is_recorded, self._library = recorder is not SILENT, native_library()
        self._segment_tokens, self._number = weights.spec.segment_tokens, weights.variant.number
        own = evaluation.table_variant
        self._choosing_number = None if own is None else own.number
        self._both, self._ahead, self._late, self._rows = (calls.asked() for _ in range(4))
        self._sizes = values.coder.row_bytes, weight_bytes(weights.spec)
        # Codes of tokens that had none, and exact rows that come in more reads than one.
        self._arrived = ReusedRows(self._sizes[0], accountant)
        self._together, self._most_together = ReusedRows(row_bytes, accountant), cold.most_exact
        self._no_rows = self._together.take(0)
        self._weighed = CountedMemory(self._sizes[1], accountant)
        # Groups of tokens, and the bytes of products that are kept of as many.
        self._kept, self._kept_of = CountedMemory(1, accountant), (-1, 0)
        self._splits = SplitPool(evaluation.sets, self._sizes[0], accountant)
        # Coded tokens of each set, and tokens, that there is room for.
        self._room, self._arrived_at, self._newest_step = (0, 0), 0, 0
        self._chosen = self._splits.take(0, 0)
        self._reads = ReadsAhead(values, file, pools, prefetch, weights.spec)

    @property
    def chosen(self) -> Sets:
        """The sets that the last `step` chose."""
        return self._chosen.sets

    def room(self) -> SplitRoom:
        """Return memory for a sequence that takes steps with others."""
        return SplitRoom(self._evaluation.sets, *self._sizes, self._accountant)

    def look(
        self, layer: int, splits: Iterable[tuple[Sequence, SplitRows]], call: Callable[[int], bool]
    ) -> None:
        """Have a call look at codes of a layer's tokens, given the address of their table."""
        for sequence, split in splits:
            split.tell_values(self._shadow.complete_values(layer, sequence).words)
        # They stay, whoever makes room meanwhile.
        chunks = self._values.layers[layer].columns.chunks
        self._values.look(layer, call)
        del chunks

    def count(self, sequence: Sequence, split: SplitRows) -> tuple[int, int]:
        """Count coded tokens that a layer attended to; return them and those without codes."""
        table, missing = split.coded.table, int(split.table.missing_count)
        coded = table.set_count * table.set_rows
        for counters in (self._counters, sequence.counters):
            counters.coded_tokens += coded
            counters.coded_arrivals += missing
        return coded, missing

    def cover(self, split: SplitRows) -> None:
        """Have tables for what was attended to, and codes, for which others may go."""
        rows = int(split.table.rows_end)
        if rows > self._values.covered:
            self._values.cover(rows)

    def begin_step(self) -> None:
        """Note that a forward pass begins; what one that broke off began to read is dropped."""
        if self._file is not None and self._reads.has_begun:
            self._file.drop()
            self._reads.has_begun = False
        self._values.begin_step()

    # --- ahead of a layer's turn -----------------------------------------------------------

    def choose_next(
        self, layer: int, sequence: Sequence, query: torch.Tensor | Prediction, scaling: float
    ) -> SplitAhead | ChoiceAhead | None:
        """Choose for the token that is about to come to a layer, and begin to read what is cold.

        Parameters and errors as in `NativeDecode.choose_next`.

        Returns
        -------
        What is chosen, or who chooses it; None, and nothing is done, where no token is coded or the
        choice is not one that the native library makes over its tables.
        """
        past, ahead = sequence.lengths[layer], self._ahead
        if sequence.observed[layer] is not None:
            return None
        if not self._is_told(ahead, past, 1, sequence.lacking, scaling):
            return None
        # What `tell_coming` does for a prediction, a call less deep.
        if isinstance(query, Prediction):
            told = self._calls.tell_prediction(ahead.step, query, query.before_positions())
        else:
            told = self._calls.tell_coming(ahead.step, query)
        if told is None:
            return None
        number, table = self._choosing_number, sequence.table_addresses[layer]
        assert number is not None
        try:
            with self._selection.scoring:
                own = self._shadow.described(layer, sequence, past)
                if own is None:
                    return None
                split = self._splits.take(ahead.count, int(ahead.step.exact))
                is_hot = self._newest_step >= self._calls.aside_from
                # What several read of a layer they begin to read together.
                is_aside = is_hot or not self._prefetch.gathers
                if is_aside and self._may_choose_aside(past, ahead):
                    reads = partial(self._reads.begin, layer, sequence, past, split)
                    read = None if is_hot else reads
                    choice = ChoiceAhead(layer, sequence, split, own, read)
                    choice.begin(number, past, ahead.address)
                    return choice
                words = sequence.known_words(layer)
                split.table.segments, split.table.segment_count = words.words, len(words.values)
                # While rows of the layer move nobody may look where they are.
                self._pools.wait_for(layer)
                pool = self._pools.layers[layer].table_address
                choose, rest = self._library.functions.hillinfer_choose_split, split.address
                with (codes := self._values.layers[layer]).changing:
                    outcome = choose(number, table, pool, codes.address, ahead.address, rest)
                is_here = not outcome or self._library.are_here("choosing", outcome)
                own.coded_tokens = sequence.tables.coded[layer]
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        landed = None if is_here else self._reads.cold(layer, sequence, split)
        return SplitAhead(landed, split)

    def choose_late(
        self, layer: int, sequence: Sequence, query: torch.Tensor | Prediction, scaling: float
    ) -> ChoiceAhead | None:
        """Return who chooses once the layer's own products have brought its weights.

        None where something may have to be read before, so that `choose_next` is to choose now.
        Parameters as there, and a query may be what computes it.
        """
        past, lacking, late = sequence.lengths[layer], sequence.lacking, self._late
        if sequence.observed[layer] is not None or sequence.told is not None:
            return None
        # Tables describe what they did before also where it begins behind the new token.
        if not isinstance(query, Prediction) or past % GROUP_TOKENS == GROUP_TOKENS - 1:
            return None
        asked = past, 1, lacking, scaling
        if self._newest_step < self._calls.aside_from or not self._is_told(late, *asked):
            return None
        if not self._may_choose_aside(past, late):
            return None
        with self._selection.scoring:
            own, number = self._shadow.described(layer, sequence, past), self._choosing_number
        if own is None or number is None:
            return None
        split = self._splits.take(late.count, int(late.step.exact))
        choice = ChoiceAhead(layer, sequence, split, own, None)

        def begin() -> None:
            # Another sequence may have asked meanwhile; what was predicted is copied.
            self._is_told(late, *asked)
            told = self._calls.tell_prediction(late.step, query, query.before_positions())
            choice.begin(number, past, late.address)
            del told

        choice.wait(begin)
        return choice

    def begin_to_read(
        self, layer: int, sequence: Sequence, past: int, sets: Sets, exact: Sets
    ) -> SplitAhead:
        """Begin to read what is cold of chosen tokens, in any thread; see `ReadsAhead.begin`.

        They are ascending int64 positions of each set, and the exact ones among them.
        """
        split = self._splits.told(sets, exact, past + 1)
        return self._reads.begin(layer, sequence, past, split)

    # --- in its turn -----------------------------------------------------------------------

    def step(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float, step: int
    ) -> torch.Tensor | None:
        """Choose for a token that was just appended, and attend to what is chosen.

        Parameters, result and errors as in `NativeDecode.step`; None also where no token is coded.
        """
        length, both = sequence.lengths[layer], self._both
        if sequence.observed[layer] is not None or self._choosing_number != self._number:
            return None
        if not self._is_told(both, length, 0, sequence.lacking, scaling):
            return None
        if not self._calls.tell_query(both.step, query):
            return None
        with self._selection.scoring:
            words = self._shadow.complete_values(layer, sequence)
            own = self._shadow.described(layer, sequence, length)
            if own is None:
                return None
            count, best = both.count, both.step.exact
            if self._chosen.room != self._splits.room:
                self._chosen = self._splits.take(count, best)
            split = self._chosen
            self._expect(split, words, count, best, length)
            # Where something is cold keys are read anew once it is there.
            is_hot, groups = step >= self._calls.aside_from, -(-length // GROUP_TOKENS)
            if groups != self._kept_of[0]:
                kept = kept_product_bytes(self._shadow.spec, length)
                self._kept.expect(kept)
                self._kept_of = groups, kept
            both.step.kept_bytes = self._kept_of[1] if is_hot else 0
            self._calls.settle(layer, sequence, length)
            given = layer, sequence, both, split, query, step, None
            out = self._attended("hillinfer_decode_split", *given)
            own.coded_tokens = sequence.tables.coded[layer]
        self.cover(split)
        sets = self._evaluation.sets
        for counters in (self._counters, sequence.counters):
            counters.scored_tokens += length * sets
            counters.selected_tokens += both.count * sets
        return out

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: Sets,
        scaling: float,
        step: int,
        landed: LandedRows | None,
        exact: Sets,
    ) -> torch.Tensor:
        """Attend to what is selected, ascending int64 positions of each set, and the exact ones.

        Other parameters, result and errors as in `attend_split`.
        """
        split = self._splits.told(sets, exact, sequence.lengths[layer])
        return self.attend_split(layer, sequence, query, scaling, step, SplitAhead(landed, split))

    def attend_split(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        scaling: float,
        step: int,
        ahead: SplitAhead,
    ) -> torch.Tensor:
        """Attend to what is chosen, and let exact rows that were cold become hot.

        Parameters
        ----------
        layer, sequence
            Where.
        query
            (query_heads, 1, head_dim): the true one, whichever ranked.
        scaling, step
            Factor on inner products, and the current step.
        ahead
            What is chosen, and what was read ahead of it; given up here.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        asked, length, split = self._rows, sequence.lengths[layer], ahead.split
        self._newest_step = step
        count, best = int(split.table.set_rows), int(split.exact.table.set_rows)
        given = query
        if not self._calls.tell_query(asked.step, query):
            given = host_query(query)[:, None].contiguous()
            self._calls.tell_query(asked.step, given)
        if asked.of != (0, 0, scaling):
            asked.tell_scaling(scaling)
            asked.of = 0, 0, scaling
        asked.count, asked.step.exact, asked.step.threads = count, best, torch.get_num_threads()
        words, kept = self._shadow.settled(layer, sequence, length) or (None, None)
        if words is None:
            with self._selection.scoring:
                words = self._shadow.complete_values(layer, sequence)
                if self._shadow.described(layer, sequence, length) is None:
                    shadows = partial(self._shadow.shadows, layer, sequence)
                    self._weighing.tell(layer, given, scaling, split, shadows)
                else:
                    kept = [one.layers[layer].shadow for one in sequence.segments]
        self._expect(split, words, count, best, length)
        self._calls.settle(layer, sequence, length)
        told = layer, sequence, asked, split, query, step, ahead.landed
        out = self._attended("hillinfer_attend_split", *told)
        self.cover(split)
        if kept is None:
            split.tell_weights(None)
        self._splits.give(split)
        del kept
        return out

    # --- inside ----------------------------------------------------------------------------

    def _is_told(
        self, asked: AskedStep, stored: int, coming: int, lacking: int, scaling: float
    ) -> bool:
        """Ask for what all layers of a step choose alike; False where nothing is coded, or told."""
        if asked.of == (stored, lacking, scaling):
            return True
        length = stored + coming
        if self._choosing_number is None or not math.isfinite(scaling):
            return False
        wanted, exact = self._evaluation.wanted_split(length, lacking)
        if exact.count == wanted.count:
            return False
        wanted.check(length, coming)
        exact.check(length, coming)
        self._selection.make_room(stored)
        self._splits.expect(wanted.count, exact.count, length)
        asked.tell((stored, lacking, scaling), coming, wanted, exact.count)
        return True

    def _expect(
        self, split: SplitRows, words: ValueWords, count: int, exact: int, length: int
    ) -> None:
        """Say what is known of values, and have memory for L' and codes of coded tokens."""
        coded, table = count - exact, split.table
        if coded > self._room[0] or length > self._room[1]:
            self._make_room(min(round_up(coded, GROUP_TOKENS), count), length)
        table.segments, table.segment_count = words.words, len(words.values)
        table.arrived = self._arrived_at

    def _make_room(self, coded: int, length: int) -> None:
        """Have memory for so many coded tokens of each set, of so many tokens, or for more."""
        coded = max(coded, self._room[0])
        tokens, sets = round_up(max(length, self._room[1]), GROUP_TOKENS), self._evaluation.sets
        self._weighed.expect(sets * coded)
        arrived = self._arrived.take(min(sets * coded, tokens))
        if self._file is not None:
            self._file.expect(most_coded(sets, coded, tokens))
        self._codes, self._arrived_at = arrived, address_of(arrived)
        self._room = coded, tokens

    def _may_choose_aside(self, past: int, ahead: AskedStep) -> bool:
        """Say whether a thread of the library's may choose while this one goes on."""
        is_alone = ahead.step.threads < 2 or self._is_recorded
        return not is_alone and may_choose_aside(past, self._segment_tokens)

    def _attended(
        self,
        name: str,
        layer: int,
        sequence: Sequence,
        asked: AskedStep,
        split: SplitRows,
        query: torch.Tensor,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor:
        """Do what one of the library's functions does, and what it leaves to be done."""
        length, out = sequence.lengths[layer], torch.empty(query.shape)
        function, asked.step.step = getattr(self._library.functions, name), step
        most = min(self._evaluation.sets * int(asked.step.exact), length)
        # Before anybody looks at rows, which to take memory may move.
        together = self._together.take(most) if most > self._most_together else self._no_rows
        pool = self._pools.layers[layer].table_address
        rest = asked.address, split.address, split.misses.address, out.data_ptr()
        started, is_here = time.perf_counter_ns(), False
        chunks: tuple[NDArray[np.uint8], ...] = ()
        entry: LayerStep | None = None
        is_announced = landed is not None
        if not is_announced and self._file is not None and self._reads.has_begun:
            is_announced = self._file.on_way(layer, id(sequence)) is not None
        try:
            with self._pools.attending:
                if not is_announced:
                    with (codes := self._values.layers[layer]).changing:
                        at = sequence.table_addresses[layer], pool, codes.address
                        outcome = function(self._number, *at, *rest)
                        if outcome:
                            # They stay, whoever makes room until all is here.
                            chunks = codes.columns.chunks
                    is_here = not outcome or self._library.are_here(name, outcome)
                    self._pools.hits.note(layer, sequence, length & -GROUP_TOKENS, length)
                    if self._calls.counts_here:
                        self._calls.count(layer, sequence, split.exact, split.misses)
                    if self._is_recorded:
                        stop = time.perf_counter_ns()
                        self._recorder.note(Lane.COMPUTE, "attention", started, stop, layer=layer)
                if not is_here:
                    self._reads.has_begun = True
                    given = self._calls, self._values, self._file, self._recorder
                    call = SplitCall(*given, layer, sequence, split, together)
                    call.begin(name, self._number, pool, asked, out)
                    look = call.look if is_announced else None
                    entry = self._cold.bring(layer, sequence, step, landed, split, call, look)
        except NonFiniteQueryError as error:
            raise explained(layer, error) from error
        del chunks
        coded = self.count(sequence, split)
        if entry is None:
            self._log.end_hot(layer, sequence, step, split.exact.table.count, coded)
        else:
            sequence.count_reads(0, 0, read := int(split.table.read_count))
            if read or entry.cold_rows:
                self._calls.note_cold(step)
            entry.coded_tokens, entry.coded_arrivals = coded
            self._log.end(entry, sequence)
        return out if query.dtype is torch.float32 else out.to(query.dtype)
