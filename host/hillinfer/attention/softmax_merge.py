# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention over stored rows, one block of rows after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.attention.native import PromptMerge, is_worthwhile
from hillinfer.kv.gather import Gather
from hillinfer.kv.prefetch_buffer import LandedRows
from hillinfer.kv.sequence import RowLayout, Sequence
from hillinfer.native.structures import row_addresses
from hillinfer.schedule.windows import PassWindows
from hillinfer.statistics import Counters
from hillinfer.trace.recorder import SILENT, Lane, Recorder

# --- One block ---

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to every token of a block.

    Query heads that share a KV head are stacked as rows of one matrix, so that no key is copied
    or read twice.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    keys, values
        (kv_heads, tokens, head_dim), the same type and device.
    scaling
        Factor on inner products.

    Returns
    -------
    The normalised output (query_heads, queries, head_dim), and log-sum-exp of the scaled inner
    products, float32 (query_heads, queries).
    """
    heads, queries, head_dim = query.shape
    packed = query.reshape(1, keys.shape[0], -1, head_dim)
    if query.device.type == "cpu":
        out, log_sum = _CPU_FLASH(packed, keys[None], values[None], scale=scaling)
    else:
        out, log_sum = attend_explicitly(packed, keys[None], values[None], scaling, None)
    return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)


def attend_causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a block of the queries' own tokens, each query to itself and those before it.

    Shapes as in `attend_block`, with as many tokens as queries.
    """
    heads, queries, head_dim = query.shape
    kv_heads = keys.shape[0]
    if query.device.type == "cpu":
        # KV heads stand where the kernel has its batch: it reads the same keys for a whole group.
        shape = (kv_heads, heads // kv_heads, queries, head_dim)
        out, log_sum = _CPU_FLASH(
            query.reshape(shape),
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            is_causal=True,
            scale=scaling,
        )
        return out.reshape(heads, queries, head_dim), log_sum.reshape(heads, queries)
    keys, values = (states.repeat_interleave(heads // kv_heads, dim=0) for states in (keys, values))
    future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    return attend_explicitly(query, keys, values, scaling, future)


def attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with plain products, in float32, on a device without a kernel of its own.

    Inner products would overflow FP16, and BF16 would round them coarsely.

    Parameters
    ----------
    query
        (any, rows, head_dim); every leading dimension is the keys', too.
    keys, values
        (any, tokens, head_dim).
    scaling
        Factor on inner products.
    hidden
        Bool (rows, tokens), true where a row must not look; None where it may everywhere.

    Returns
    -------
    As `attend_block`, float32.
    """
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scaling
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    log_sum = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - log_sum[..., None]), values.float()), log_sum


# --- Blocks merged ---

BlockKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


class SoftmaxMerge:
    """Collects attention over blocks as if all rows had been there at once.

    Each block gives an output and the log of its denominator; two of those merge exactly. The
    order of blocks changes output bits, so callers add them in ascending position.

    Parameters
    ----------
    query
        (query_heads, queries, head_dim) in the type attention computes in.
    scaling
        Factor on inner products.
    attend
        The kernel for a block that all of some queries see.
    """

    def __init__(
        self, query: torch.Tensor, scaling: float, attend: BlockKernel = attend_block
    ) -> None:
        self._attend = attend
        self._query = query
        self._scaling = scaling
        self._out: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add_block(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to a block that the queries from `first` on see, all of it.

        Parameters
        ----------
        keys, values
            (kv_heads, tokens, head_dim) each.
        first
            The first of these queries.
        """
        out, log_sum = self._attend(self._query[:, first:], keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
        """Attend to as many queries' own tokens, causally; the first query is `first`.

        Parameters as in `add_block`.
        """
        own = self._query[:, first : first + keys.shape[1]]
        out, log_sum = attend_causal(own, keys, values, self._scaling)
        self._merge(out, log_sum, first)

    def result(self) -> torch.Tensor:
        """Return the merged output, (query_heads, queries, head_dim)."""
        if self._out is None:
            raise ValueError("attention over no rows: add a block first")
        return self._out.to(self._query.dtype)

    def _merge(self, out: torch.Tensor, log_sum: torch.Tensor, first: int) -> None:
        if self._out is None or self._log_sum is None:
            if out.shape == self._query.shape:
                self._out, self._log_sum = out, log_sum
                return
            # Some queries wait for their first block, whose weight is then exactly 1.
            self._out = torch.zeros_like(self._query, dtype=torch.float32)
            self._log_sum = torch.full_like(self._out[..., 0], -torch.inf)
        # In place: these pass through memory once per block, which is what merging costs.
        self._out = self._out.float()
        part = slice(first, first + out.shape[1])
        old = self._log_sum[:, part]
        weight = torch.sigmoid(log_sum - old)
        self._out[:, part].lerp_(out.float(), weight[..., None])
        self._log_sum[:, part] = torch.logaddexp(old, log_sum)


# --- Keys and values of rows ---


class RowStates:
    """Brings rows to a model's device and takes keys and values out of them.

    Parameters
    ----------
    layout
        Says what is in a row.
    counters
        Where copies to the model's device are counted.
    """

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
        like
            The tensor.

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


def compute_type(query: torch.Tensor) -> torch.dtype:
    """Attention computes in the model's type, but FP16 kernels are slow and coarse on a CPU."""
    if query.dtype == torch.float16 and query.device.type == "cpu":
        return torch.float32
    return query.dtype


# --- A prompt's chunk ---

# For each row that there is room for, so many are looked at whether they are cold.
_LOOKED_AT = 8


class DenseAttention:
    """Attends to all rows of a sequence, a block of rows after the other, in ascending position.

    All queries of a chunk attend to a block at once, so that a block is brought and widened once.

    Parameters
    ----------
    gather
        Brings rows together.
    states
        Takes keys and values out of them.
    block_rows
        Past rows that it brings at a time.
    recorder
        Notes how long attention itself takes, once rows are there.
    windows
        Told when layers want rows and have them; None where nobody asks.
    layers
        Of the model: behind all but the last one the first rows of the next are read ahead, while
        the model computes what is between both.
    ahead_rows
        Most of them; 0 reads nothing ahead.
    """

    def __init__(
        self,
        gather: Gather,
        states: RowStates,
        block_rows: int,
        recorder: Recorder = SILENT,
        windows: PassWindows | None = None,
        layers: int = 0,
        ahead_rows: int = 0,
    ) -> None:
        self._recorder = recorder
        self._windows = windows
        self._layers = layers
        self._ahead_rows = ahead_rows
        # What is read ahead for which layer and sequence of the pass under way.
        self._landing: dict[tuple[int, int], LandedRows | None] = {}
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
        scaling
            Factor on inner products.
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
        layer, sequence
            Whose.
        look
            Is given the uint64 addresses of each block, in ascending position from the first row
            on, which are valid until it returns.
        """
        self._watching[layer, id(sequence)] = look

    def watch_none(self) -> None:
        """Forget who was to look, as a pass broke off."""
        self._watching.clear()

    def _past_rows(
        self, layer: int, sequence: Sequence, past: NDArray[np.int64], tokens: int
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield past rows block by block, and begin to read those of the next layer behind them."""
        if layer == 0:
            # Of a pass that broke off, whatever is left was given up.
            self._landing.clear()
        windows = self._windows
        if windows is not None:
            windows.come(layer, tokens, len(past))
        landed = self._landing.pop((layer, id(sequence)), None)
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
        self._landing[following, id(sequence)] = self._gather.land(
            following, sequence, ahead, sequence.held_starts[following]
        )
        if windows is not None:
            windows.go(layer, tokens, len(past), min(len(past), self._ahead_rows))


# --- One token ---


class RowAttention:
    """Attends to selected rows of a sequence, in ascending position.

    For what the native library does not do: groups larger than it has room for, and everything
    selected, where output is that of an ordinary cache to the last bit.

    Parameters
    ----------
    gather
        Brings rows together, or tells where they lie.
    states
        Takes keys and values out of them.
    recorder
        Notes how long attention itself takes, once rows are there.
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
        layer, sequence
            Whose rows.
        query
            (query_heads, 1, head_dim) on the model's device.
        sets
            Ascending int64 positions: one set for the layer, or one per KV head.
        scaling
            Factor on inner products.
        step
            The current step.
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
