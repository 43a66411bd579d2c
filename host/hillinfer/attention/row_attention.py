# SPDX-License-Identifier: Apache-2.0
"""Exact attention over rows of a sequence: of a chunk, to all rows or one set, and of a token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.kernels import PromptMerge, SoftmaxMerge, compute_type, is_worthwhile
from hillinfer.kv.gather import Gather
from hillinfer.kv.pool_manager import PoolManager
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import RowLayout, Sequence
from hillinfer.kv.sequence_shadows import SequenceShadows
from hillinfer.native.structures import row_addresses
from hillinfer.schedule.windows import PassWindows
from hillinfer.scoring.scorer import Scorer, SegmentShadow, Wanted
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder
from hillinfer_model.choices import Rule, Scope

# --- Keys and values of rows ---


class RowStates:
    """Brings rows to a model's device and takes keys and values out of them."""

    def __init__(self, layout: RowLayout, counters: Counters) -> None:
        self._layout = layout
        self._counters = counters

    def __call__(
        self, rows: NDArray[np.uint8], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows in the type and on the device of a tensor.

        Parameters
        ----------
        rows
            uint8 (rows, row_bytes).

        Returns
        -------
        Keys and values, (kv_heads, rows, head_dim) each.
        """
        return self.split(self.bring(rows, like), like)

    def bring(self, rows: NDArray[np.uint8], like: torch.Tensor) -> torch.Tensor:
        """Return rows on the device of a tensor; on the processor they are those given."""
        tensor = torch.from_numpy(rows).to(like.device)
        if like.device.type != "cpu":
            self._counters.host_to_device_bytes += tensor.numel()
        return tensor

    def split(self, rows: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of rows that are on the model's device; see the call."""
        keys, values = self.stored(rows)
        return keys.to(like.dtype), values.to(like.dtype)

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in the stored type, where they lie; see `split`."""
        layout = self._layout
        return layout.keys(rows).transpose(0, 1), layout.values(rows).transpose(0, 1)


# --- A prompt's chunk ---

# For each row that there is room for, so many are looked at whether they are cold.
_LOOKED_AT = 8


class DenseAttention:
    """Attends to all rows of a sequence, a block of rows after the other, in ascending position.

    All queries of a chunk attend to a block at once, so that a block is brought and widened once.

    Parameters
    ----------
    block_rows
        Past rows that it brings at a time.
    windows
        Told when layers want rows and have them; None where nobody asks.
    layers
        Of the model: behind all but the last one the first rows of the next are read ahead, while
        the model computes what is between both.
    ahead_rows
        Most of them; 0 reads nothing ahead.

    Attributes
    ----------
    ahead
        What is read ahead for which layer and sequence of the pass under way; to be looked at.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        block_rows: int,
        recorder: Recorder,
        windows: PassWindows | None,
        layers: int,
        ahead_rows: int,
    ) -> None:
        self._recorder, self._windows = recorder, windows
        self._layers, self._ahead_rows = layers, ahead_rows
        self.ahead: dict[tuple[int, int], LandedRows | None] = {}
        # Who looks at past rows as they come by.
        self._watching: dict[tuple[int, int], Callable[[NDArray[np.uint64]], None]] = {}
        self._gather = gather
        self._states = states
        # Widened in what gathering takes on its way, which is free by then: two blocks at once,
        # because torch's causal kernel is a fifth slower on fewer than 768 queries.
        self._own_tokens = 2 * block_rows

    def attend(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        among: list[NDArray[np.int64]] | None = None,
    ) -> torch.Tensor:
        """Attend to past rows block by block, then to the new tokens causally.

        Parameters
        ----------
        layer, sequence
            Where the new tokens were just appended.
        query
            (query_heads, tokens, head_dim) on the model's device.
        keys, values
            The new tokens', stored type, (kv_heads, tokens, head_dim), on the model's device.
        among
            The one set of past rows that are attended to, int64 and ascending; None for all.

        Returns
        -------
        (query_heads, tokens, head_dim) in the query's type.
        """
        tokens = query.shape[1]
        merge: SoftmaxMerge | PromptMerge
        if is_worthwhile(query, len(keys)):
            merge, kind = PromptMerge(query, scaling), keys.dtype
        else:
            # Models give a view across tokens, and every block would pack its heads anew.
            kind = compute_type(query)
            merge = SoftmaxMerge(query.to(kind).contiguous(), scaling)
        if among is None:
            every = np.arange(sequence.lengths[layer] - tokens)
            past = self._past_rows(layer, sequence, every, tokens)
        else:
            past = self._gather.bring(layer, sequence, among[0], None)
        for rows in past:
            with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                past_keys, past_values = self._states.stored(self._states.bring(rows, query))
                merge.add_block(past_keys.to(kind), past_values.to(kind))
        with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
            for start in range(0, tokens, self._own_tokens):
                end = min(start + self._own_tokens, tokens)
                own = keys[:, start:end].to(kind), values[:, start:end].to(kind)
                merge.add_causal(*own, start)
                if end < tokens:
                    merge.add_block(*own, end)
            return merge.result().to(query.dtype)

    def watch(
        self, layer: int, sequence: Sequence, look: Callable[[NDArray[np.uint64]], None]
    ) -> None:
        """Show somebody all past rows that the next call for a layer and sequence attends to.

        Parameters
        ----------
        look
            Is given the uint64 addresses of each block, in ascending position from the first row
            on, which are valid until it returns.
        """
        self._watching[layer, id(sequence)] = look

    def watch_none(self) -> None:
        """Forget who was to look, as a pass broke off."""
        self._watching.clear()

    def forget_ahead(self) -> None:
        """Forget what was read ahead, before a pass: what one that broke off left was given up."""
        self.ahead.clear()

    def _past_rows(
        self, layer: int, sequence: Sequence, past: NDArray[np.int64], tokens: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield past rows block by block, and begin to read those of the next layer behind them."""
        windows = self._windows
        if windows is not None:
            windows.come(layer, tokens, len(past))
        landed = self.ahead.pop((layer, id(sequence)), None)
        look = self._watching.pop((layer, id(sequence)), None)
        started = time.perf_counter_ns()
        for rows in self._gather.bring(layer, sequence, past, landed):
            if windows is not None:
                windows.note_wait(layer, started)
            if look is not None:
                look(row_addresses(rows, np.arange(len(rows))))
            yield rows
            started = time.perf_counter_ns()
        following = layer + 1
        # The next layer may have other rows, or there is none.
        if following >= self._layers or following not in sequence.band:
            if windows is not None:
                windows.end()
            return
        # Some are hot; looking at all of a long context for those that are not would take memory.
        ahead = past[: _LOOKED_AT * self._ahead_rows]
        self.ahead[following, id(sequence)] = self._gather.land(
            following, sequence, ahead, sequence.held_starts[following]
        )
        if windows is not None:
            windows.go(layer, tokens, len(past), min(len(past), self._ahead_rows))


# --- One token ---


class RowAttention:
    """Attends to selected rows of a sequence, in ascending position.

    For what the native library does not do: groups larger than it has room for, and everything
    selected, where output is that of an ordinary cache to the last bit.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        recorder: Recorder = SILENT,
    ) -> None:
        self._recorder = recorder
        self._gather = gather
        self._states = states

    def selected(
        self,
        layer: int,
        sequence: Sequence,
        query: torch.Tensor,
        sets: list[NDArray[np.int64]],
        scaling: float,
        step: int,
        landed: LandedRows | None,
    ) -> torch.Tensor:
        """Attend to selected rows and let those that were cold become hot.

        Parameters
        ----------
        query
            (query_heads, 1, head_dim) on the model's device.
        sets
            Ascending int64 positions: one set for the layer, or one per KV head.
        landed
            What of their cold rows was read ahead, or None.

        Returns
        -------
        (query_heads, 1, head_dim) in the query's type.
        """
        wide = query.to(compute_type(query))
        merges = [SoftmaxMerge(heads, scaling) for heads in wide.chunk(len(sets))]
        union = sets[0] if len(sets) == 1 else np.unique(np.concatenate(sets))
        with closing(self._gather.copied(layer, sequence, union, step, landed)) as blocks:
            for block, rows in blocks:
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    keys, values = self._states(rows, wide)
                    if len(sets) == 1:
                        merges[0].add_block(keys, values)
                        continue
                    for head, positions in enumerate(sets):
                        inside = np.flatnonzero(np.isin(block, positions, assume_unique=True))
                        if len(inside):
                            index = torch.from_numpy(inside).to(query.device)
                            own = slice(head, head + 1)
                            merges[head].add_block(keys[own, index], values[own, index])
        return torch.cat([merge.result() for merge in merges]).to(query.dtype)


# --- One selected set for all tokens of a chunk, as of a question about a document ---

# A set for each token reads more: those of a question's 30 tokens together are a third of all rows
# where each is a tenth. Here tokens are ranked by what all of the chunk's queries give them.

# Each query is scored by itself; those of a longer chunk are taken at even distances.
MOST_QUERIES = 32
# Of a score code: 1 is a weight of 0, and ten bits follow the leading one (contract, section 7).
_FRACTION_BITS = 10


def code_weights(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return the weights that score codes of rule `weight_sum` stand for, as they were cut.

    Parameters
    ----------
    codes
        uint16; 0 of an invalid token counts as a weight of 0.
    """
    magnitude = np.maximum(codes.astype(np.int64) - 1, 0)
    exponent, fraction = magnitude >> _FRACTION_BITS, magnitude & ((1 << _FRACTION_BITS) - 1)
    wide = np.ldexp((1 << _FRACTION_BITS) + fraction.astype(np.float64), exponent - 1)
    return np.where(exponent == 0, magnitude, wide)


class OneSet:
    """Ranks a sequence's past tokens for all queries of a chunk together.

    With rule `weight_sum` a token is worth the sum of what each query gives it, else the best rank
    that a query gives it. With a set for each KV head the set is what any of them selects.

    Parameters
    ----------
    wanted
        Returns how much is selected of so many tokens of a sequence that lacks so many.
    manager
        Counts what is selected as hits, once.
    scoring, make_room
        Held by whoever codes or scores, and counts what scoring so many tokens takes.
    """

    def __init__(
        self,
        scorer: Scorer,
        wanted: Callable[[int, int], Wanted],
        shadow: SequenceShadows,
        manager: PoolManager,
        scoring: threading.Lock,
        make_room: Callable[[int], None],
        recorder: Recorder,
    ) -> None:
        self._scorer, self._wanted = scorer, wanted
        self._shadow, self._manager = shadow, manager
        self._scoring, self._make_room = scoring, make_room
        self._recorder = recorder

    def chosen(
        self, layer: int, sequence: Sequence, query: torch.Tensor, scaling: float
    ) -> list[NDArray[np.int64]]:
        """Return the one set that a chunk's tokens attend to of those before them.

        Its positions are int64 and ascending.

        Parameters
        ----------
        layer, sequence
            Where the chunk's tokens were just appended.
        query
            Theirs, (query_heads, tokens, head_dim), on the model's device.

        Raises
        ------
        hillinfer_model.errors.NonFiniteQueryError
            Where a query is not finite.
        """
        past = sequence.lengths[layer] - query.shape[1]
        wanted = self._wanted(past, sequence.lacking)
        if wanted.count >= past:
            return [np.arange(past)]
        self._make_room(past)
        tokens = query.shape[1]
        chosen = np.unique(np.linspace(0, tokens - 1, min(tokens, MOST_QUERIES)).astype(np.int64))
        queries = query[:, torch.from_numpy(chosen)].transpose(0, 1).float().cpu().contiguous()
        with self._scoring:
            with self._recorder.span(Lane.HOST_SCORING, "code", layer=layer):
                segments = self._shadow.code_past(layer, sequence, past)
            with self._recorder.span(Lane.HOST_SCORING, "score", layer=layer, tokens=past):
                worth = self._worth(queries, scaling, segments, past)
        # What is kept is in the set whatever it is worth.
        worth[:, : wanted.sinks] = np.inf
        worth[:, past - wanted.recent :] = np.inf
        best = np.argsort(-worth, axis=1, kind="stable")[:, : wanted.count]
        found = np.unique(best)
        self._manager.tally(layer, sequence, found)
        return [found]

    def _worth(
        self, queries: torch.Tensor, scaling: float, segments: list[SegmentShadow], past: int
    ) -> NDArray[np.float64]:
        """Return what each token is worth to each set, float64 (sets, past)."""
        adds = self._scorer.spec.rule is Rule.WEIGHT_SUM
        sets = 1 if self._scorer.scope is Scope.LAYER else self._scorer.spec.kv_heads
        worth = np.zeros((sets, past))
        for query in queries:
            # A segment that the chunk made full has its tokens, too.
            tuples = self._scorer.tuples(query, scaling, segments)[:, :past]
            codes = (tuples >> np.uint32(16)).astype(np.uint16)
            if adds:
                worth += code_weights(codes)
            else:
                np.maximum(worth, codes, out=worth)
        return worth
