# SPDX-License-Identifier: Apache-2.0
"""A decode step of one layer in one native call, over tables that are kept between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.app.token_selection import Explained, TokenSelection
from hillinfer.attention.native_attention import NativeAttention
from hillinfer.counters import Counters
from hillinfer.hie.evaluation import ImportanceEvaluation
from hillinfer.hie.scoring_arguments import query_factor
from hillinfer.model_shape import StoredType
from hillinfer.native.library import native_library
from hillinfer.native.structures import DecodeStep, LayerTable, Shape
from hillinfer.policies.pool_policy import PoolPolicy
from hillinfer.pools.hot_pools import HotPools
from hillinfer.storage.gather import Gather
from hillinfer.storage.prefetch_buffer import LandedRows
from hillinfer.storage.sequence import Sequence
from hillinfer.storage.shadow_keeper import ShadowKeeper
from hillinfer.timeline.lane import Lane
from hillinfer.timeline.recorder import Recorder
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec

_NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Hits are counted in Python.
_NOT_COUNTED = -1
Fetched = Generator[NDArray[np.uint64], None, None]


class NativeDecode:
    """Chooses tokens, finds their rows and attends to them, for one new token on the processor.

    Where all rows are hot nothing of it happens in Python. Rows that are cold are read run by run,
    and attended to as they come.

    Parameters
    ----------
    attention
        Says what is in a row, and attends to rows that come run by run.
    spec, scope
        Of the scoring contract.
    evaluation, selection, shadow
        Who chooses, codes and knows where shadows lie.
    pools, gather
        Where rows lie, and who brings those that are cold.
    policy
        Tallies hits.
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
        policy: PoolPolicy,
        counters: Counters,
        recorder: Recorder,
    ) -> None:
        self._library = native_library()
        self._attention = attention
        self._evaluation = evaluation
        self._selection = selection
        self._shadow = shadow
        self._pools = pools
        self._gather = gather
        self._policy = policy
        self._counters = counters
        self._recorder = recorder
        shape = attention.shape
        self._query_shape = shape.query_heads, 1, shape.head_dim
        # A policy that counts in a way of its own does it in Python.
        is_common = type(policy).tally is PoolPolicy.tally
        self._shift = policy.fade_shift if is_common else _NOT_COUNTED
        choosing = evaluation.table_variant if scope is Scope.LAYER else None
        self._number = attention.variant.number
        self._choosing_number = None if choosing is None else choosing.number

        def described() -> DecodeStep:
            return DecodeStep(
                shape=Shape.of(spec, scope),
                group_size=shape.group_size,
                stored_type=0 if shape.stored_type is StoredType.BFLOAT16 else 1,
                fade_shift=self._shift,
            )

        # Another thread may choose for a layer that comes while this one attends.
        self._asked, self._asked_ahead = described(), described()
        self._positions = np.zeros(0, np.int64)
        self._addresses = np.zeros(0, np.uint64)
        self._places = 0, 0

    @property
    def chosen(self) -> NDArray[np.int64]:
        """What the last `step` chose, int64, valid until the next."""
        return self._positions[: self._asked.count]

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
        length = sequence.lengths[layer]
        # Where both compute alike one call does both.
        if self._choosing_number != self._number or not self._takes(query, scaling):
            return None
        if sequence.observed[layer] is not None or self._evaluation.selects_all(length):
            return None
        self._selection.make_room(length)
        query, out = query.detach(), torch.empty(self._query_shape)
        fetched: Fetched | None = None
        try:
            with self._selection.scoring, Explained(layer):
                own = self._shadow.described(layer, sequence, length)
                if own is None:
                    return None
                count = self._ask(self._asked, query, scaling, length, 0)
                self._asked.step = step
                self._make_places(count)
                with self._pools.attending:
                    table, started = self._begin(layer, sequence), time.perf_counter_ns()
                    is_hot = self._library.decode(
                        "hillinfer_decode_step",
                        self._number,
                        table,
                        self._pools.layers[layer].table,
                        self._asked,
                        *self._places,
                        out.data_ptr(),
                    )
                    own.coded_tokens = sequence.described[layer][1][-1]
                    chosen_at = self._note_chosen(self._asked, layer, length, started)
                    positions, addresses = self._positions[:count], self._addresses[:count]
                    self._note_hits(layer, sequence, positions)
                    if not is_hot:
                        fetched, first = self._fetch(
                            layer, sequence, positions, step, None, addresses
                        )
            self._counters.scored_tokens += length
            self._counters.selected_tokens += count
            if fetched is not None:
                return self._run_by_run(layer, query, scaling, chain(first, fetched))
        finally:
            if fetched is not None:
                # Here and now: what it holds must not wait for a traceback to go.
                fetched.close()
        self._note_attended(layer, sequence, step, count, chosen_at)
        return out if query.dtype is torch.float32 else out.to(query.dtype)

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        positions: NDArray[np.int64],
        scaling: float,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor | None:
        """Attend to selected rows and let those that were cold become hot.

        Parameters
        ----------
        layer, sequence, query, scaling, step
            As in `step`.
        positions
            int64, ascending, contiguous.
        landed
            What of their cold rows was read ahead, or None.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type; None, and nothing is done, where this is
        not for the native library: it attends to a part of all tokens and on the processor.
        """
        count = len(positions)
        if not 0 < count < sequence.lengths[layer] or not self._takes(query, scaling):
            return None
        query, out = query.detach(), torch.empty(self._query_shape)
        addresses, asked = np.empty(count, np.uint64), self._asked
        fetched: Fetched | None = None
        try:
            with self._pools.attending:
                self._tell_query(asked, query, scaling)
                asked.step = step
                table, started = self._begin(layer, sequence), time.perf_counter_ns()
                is_hot = self._library.decode(
                    "hillinfer_attend_tokens",
                    self._number,
                    table,
                    self._pools.layers[layer].table,
                    asked,
                    positions.ctypes.data,
                    count,
                    addresses.ctypes.data,
                    out.data_ptr(),
                )
                self._note_hits(layer, sequence, positions)
                # What was read ahead is to be given back also where it is not wanted any more.
                if not is_hot or landed is not None:
                    fetched, first = self._fetch(
                        layer, sequence, positions, step, landed, addresses
                    )
            if fetched is not None:
                return self._run_by_run(layer, query, scaling, chain(first, fetched))
        finally:
            if fetched is not None:
                # Here and now: what it holds must not wait for a traceback to go.
                fetched.close()
        self._note_attended(layer, sequence, step, count, started)
        return out if query.dtype is torch.float32 else out.to(query.dtype)

    def choose_next(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float
    ) -> tuple[NDArray[np.int64], LandedRows | None] | None:
        """Choose for the token that is about to come to a layer, and begin to read what is cold.

        Parameters
        ----------
        layer, sequence
            Where one token more is coming; all others are stored.
        query, scaling
            As in `step`; the query is a predicted one.

        Returns
        -------
        int64 positions, ascending, the coming token's the last, and what lands of them; None, and
        nothing is done, where the choice is not one that the native library makes over its tables.

        Raises
        ------
        CacheUseError
            Where the query is not finite.
        """
        past = sequence.lengths[layer]
        if self._choosing_number is None or not self._takes(query, scaling):
            return None
        if sequence.observed[layer] is not None:
            return None
        self._selection.make_room(past)
        query, asked = query.detach(), self._asked_ahead
        with self._selection.scoring, Explained(layer):
            own = self._shadow.described(layer, sequence, past)
            if own is None:
                return None
            positions = np.empty(self._ask(asked, query, scaling, past + 1, 1), np.int64)
            table, started = self._told(layer, sequence), time.perf_counter_ns()
            # While rows of the layer move nobody may look where they are.
            is_still = self._pools.is_still(layer)
            is_hot = self._library.decode(
                "hillinfer_choose_tokens",
                self._choosing_number,
                table,
                self._pools.layers[layer].table if is_still else None,
                asked,
                positions.ctypes.data,
            )
            own.coded_tokens = sequence.described[layer][1][-1]
            self._note_chosen(asked, layer, past, started)
        if is_hot and is_still:
            return positions, None
        # When attention looks, the tail holds what it holds now, or what follows a full group.
        held = past // GROUP_TOKENS * GROUP_TOKENS
        return positions, self._gather.land(layer, sequence, positions[:-1], held)

    # --- inside ----------------------------------------------------------------------------

    def _takes(self, query: torch.Tensor, scaling: float) -> bool:
        """Say whether a query is one that the library can read; others are refused elsewhere."""
        return (
            query.shape == self._query_shape
            and query.dtype in _NUMBER_TYPES
            and query.is_cpu
            and query.stride(2) == 1
            and math.isfinite(scaling)
        )

    def _ask(
        self, asked: DecodeStep, query: torch.Tensor, scaling: float, length: int, coming: int
    ) -> int:
        """Say what is to be chosen, and return how many tokens that is."""
        wanted = self._evaluation.wanted(length)
        wanted.check(length, coming)
        self._tell_query(asked, query, scaling)
        asked.factor, asked.coming = query_factor(scaling), coming
        asked.sinks, asked.recent, asked.count = wanted.sinks, wanted.recent, wanted.count
        return wanted.count

    @staticmethod
    def _tell_query(asked: DecodeStep, query: torch.Tensor, scaling: float) -> None:
        asked.query, asked.head_stride = query.data_ptr(), query.stride(0)
        asked.query_type = _NUMBER_TYPES[query.dtype]
        asked.scaling, asked.threads = scaling, torch.get_num_threads()

    def _make_places(self, count: int) -> None:
        if count > len(self._positions):
            room = 2 * count
            self._positions = np.empty(room, np.int64)
            self._addresses = np.empty(room, np.uint64)
            self._places = self._positions.ctypes.data, self._addresses.ctypes.data

    def _begin(self, layer: int, sequence: Sequence) -> LayerTable:
        """Wait until no row of a layer moves, and return its table."""
        self._pools.settle(layer)
        length = sequence.lengths[layer]
        if length > len(sequence.hits.counts[layer]):
            self._pools.cover_hits(sequence.hits, layer, length)
        return self._told(layer, sequence)

    @staticmethod
    def _told(layer: int, sequence: Sequence) -> LayerTable:
        """Return a layer's table, with what may have changed since the last step."""
        table = sequence.tables[layer]
        table.length, table.held = sequence.lengths[layer], sequence.held_starts[layer]
        numbers, table.groups = sequence.group_table()
        table.group_count = len(numbers)
        table.hits = sequence.hits.addresses[layer]
        table.hit_count = len(sequence.hits.counts[layer])
        return table

    def _note_hits(self, layer: int, sequence: Sequence, positions: NDArray[np.int64]) -> None:
        if self._shift == _NOT_COUNTED:
            self._policy.tally(sequence.hits.counts[layer], positions)
        length = sequence.lengths[layer]
        self._pools.hits.note(layer, sequence, sequence.tail_start(layer), length)

    def _note_chosen(self, asked: DecodeStep, layer: int, tokens: int, started: int) -> int:
        """Note how long coding and choosing took; return when the latter ended."""
        coded, chosen = int(asked.coded_at), int(asked.chosen_at)
        self._recorder.note(Lane.HOST_SCORING, "code", started, coded, layer=layer)
        self._recorder.note(Lane.HOST_SCORING, "score", coded, chosen, layer=layer, tokens=tokens)
        return chosen

    def _note_attended(
        self, layer: int, sequence: Sequence, step: int, count: int, started: int
    ) -> None:
        stop = time.perf_counter_ns()
        self._recorder.note(Lane.COMPUTE, "attention", started, stop, layer=layer)
        self._gather.note_hot(layer, sequence, step, count)

    def _fetch(
        self,
        layer: int,
        sequence: Sequence,
        positions: NDArray[np.int64],
        step: int,
        landed: LandedRows | None,
        addresses: NDArray[np.uint64],
    ) -> tuple[Fetched, list[NDArray[np.uint64]]]:
        """Begin to fetch rows some of which are cold; return the runs, and the first of them.

        Called while `attending` is held, and it is held from then on: until all rows were attended
        to none may move.
        """
        fetched = self._gather.in_place(
            layer, sequence, positions, step, landed, self._library.tile_rows, addresses
        )
        try:
            return fetched, [next(fetched)]
        except BaseException:
            fetched.close()
            raise

    def _run_by_run(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float,
        runs: Iterable[NDArray[np.uint64]],
    ) -> torch.Tensor:
        """Attend to runs of rows as they come."""
        softmax = self._attention.begin(query[:, 0], scaling)
        for run in runs:
            with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                softmax.add([run])
        return softmax.result()[:, None].to(query.dtype)
