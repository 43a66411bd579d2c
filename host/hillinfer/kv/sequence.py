# SPDX-License-Identifier: Apache-2.0
"""One sequence's tokens, its block table, and where its rows and shadow lie."""

from __future__ import annotations

import ctypes
from array import array
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.kv.row_layout import RowLayout
from hillinfer.model_shape import ModelShape
from hillinfer.native.structures import LayerTable
from hillinfer.shadow.segments import Segment
from hillinfer_model.kernel_spec import GROUP_TOKENS

_QUERY_ITEM_BYTES = 4


def observed_bytes(shape: ModelShape, queries: int) -> int:
    """Return the bytes of the last prefill queries of one sequence."""
    return shape.layers * queries * shape.query_heads * shape.head_dim * _QUERY_ITEM_BYTES


# --- How often each token was selected ---

HIT_BYTES = 2
GROWTH_TOKENS = 1024


class HitRateTable:
    """2 bytes per token and layer of one sequence (HillInfer section 5.4).

    What they mean is the pool policy's matter; none lets them overflow.

    Parameters
    ----------
    layers
        Layers of the model.
    """

    def __init__(self, layers: int) -> None:
        # One array per layer: growing one never needs a second copy of all.
        self.counts: list[NDArray[np.uint16]] = [np.zeros(0, np.uint16) for _ in range(layers)]
        # Asking numpy takes long, and every layer would at every step.
        self.addresses = [0] * layers

    @property
    def byte_count(self) -> int:
        """Memory of the table."""
        return sum(counts.nbytes for counts in self.counts)

    def growth_bytes(self, layer: int, tokens: int) -> int:
        """Return by how much `cover` would grow the table."""
        return max(0, room_for(tokens) - len(self.counts[layer])) * HIT_BYTES

    def cover(self, layer: int, tokens: int) -> None:
        """Make room for a layer's positions below `tokens`, with no hits yet."""
        counts = self.counts[layer]
        if tokens > len(counts):
            grown = np.zeros(room_for(tokens), np.uint16)
            grown[: len(counts)] = counts
            self.counts[layer], self.addresses[layer] = grown, grown.ctypes.data

    def forget(self, length: int) -> None:
        """Drop the hits of positions from `length` on."""
        for counts in self.counts:
            counts[length:] = 0

    def copy(self) -> HitRateTable:
        """Return a table with the same hits that goes on by itself."""
        copy = HitRateTable(0)
        copy.counts = [counts.copy() for counts in self.counts]
        copy.addresses = [counts.ctypes.data for counts in copy.counts]
        return copy


def room_for(tokens: int) -> int:
    """Return the entries that a layer's table has for so many tokens."""
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


# --- One sequence's tokens and where its rows and shadow lie ---


class Sequence:
    """State of one sequence; rows by logical position, padding never stored.

    Groups are numbers in the cold pool, one per 64 positions, the same in every layer; full
    groups may be shared with sequences that have the same prefix. The open group's rows, fewer
    than 64, lie in `tails`; a group that the newest token filled lies there until the next comes.

    Parameters
    ----------
    layers
        Layers of the model.
    row_bytes
        Bytes of a row.
    """

    def __init__(self, layers: int, row_bytes: int) -> None:
        # 4 bytes per token, where a list of numbers takes 36.
        self.token_ids = array("i")
        self.lengths = [0] * layers
        self.groups: list[int] = []
        # The same as an array: made anew for every group that comes, not at every step.
        # The groups' numbers and where they lie; replaced together, by any thread.
        self._group_table: tuple[NDArray[np.int64], int] = (np.zeros(0, np.int64), 0)
        self.tails = np.zeros((layers, GROUP_TOKENS, row_bytes), np.uint8)
        # They stay where they are, and asking numpy takes long.
        self._tail_address: int = self.tails.ctypes.data
        self._tail_bytes = GROUP_TOKENS * row_bytes
        # What the native library knows of each layer: what stays is told once, what changes when it
        # does.
        self.tables = [
            LayerTable(tail=self.tail_address(layer), row_bytes=row_bytes)
            for layer in range(layers)
        ]
        self.table_addresses = [ctypes.addressof(table) for table in self.tables]
        # Of which moment the descriptors of its shadow are, layer by layer, and their memory.
        self.described = [(-1, array("q"))] * layers
        # Position of the first row in `tails`, layer by layer.
        self.held_starts = [0] * layers
        self.segments: list[Segment] = []
        self.hits = HitRateTable(layers)
        # Queries of the last prefill tokens, float32 (queries, query_heads, head_dim), until what
        # they select is counted.
        self.observed: list[torch.Tensor | None] = [None] * layers

    @property
    def tokens(self) -> int:
        """Tokens whose rows are there, by the first layer: it has a forward pass's first."""
        return self.lengths[0]

    def tail_start(self, layer: int) -> int:
        """Return the position of the open group's first token in a layer."""
        return self.lengths[layer] // GROUP_TOKENS * GROUP_TOKENS

    def tail_address(self, layer: int) -> int:
        """Return where a layer's tail lies in memory."""
        return self._tail_address + layer * self._tail_bytes

    def tell(self, layer: int) -> object:
        """Bring a layer's table for the native library up to date.

        Returns
        -------
        What its addresses point to and another thread may replace, to be held while the library is
        at work.
        """
        table, known = self.tables[layer], self._group_table
        if len(known[0]) != len(self.groups):
            known = self.group_table()
        table.length, table.held = self.lengths[layer], self.held_starts[layer]
        table.groups, table.group_count = known[1], len(known[0])
        hits = self.hits
        table.hits, table.hit_count = hits.addresses[layer], len(hits.counts[layer])
        return known

    def group_table(self) -> tuple[NDArray[np.int64], int]:
        """Return the numbers of all groups, int64, and their address while the array is held."""
        known = self._group_table
        if len(known[0]) != len(self.groups):
            numbers = np.asarray(self.groups, np.int64)
            known = self._group_table = numbers, numbers.ctypes.data
        return known

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row numbers of positions in full groups, int64 of the same shape."""
        table, _ = self.group_table()
        # Every step asks for those of all hot rows, and numpy's remainder takes many times what its
        # quotient does.
        first: NDArray[np.int64] = table.take(positions // GROUP_TOKENS) * GROUP_TOKENS
        return first + (positions & (GROUP_TOKENS - 1))

    def drop_groups(self, keep: int) -> None:
        """Forget all groups but the first `keep`."""
        del self.groups[keep:]
        # Others may come in their places before anyone asks for rows.
        self._group_table = (np.zeros(0, np.int64), 0)


# --- The keys of open groups, where they lie ---


class TailKeys:
    """Views the keys in a sequence's tails, made once for as long as the sequence lives.

    A view takes longer to make than a token's keys take to code, and each step needs one per layer.

    Parameters
    ----------
    layout
        Where in a row they are.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._known: WeakKeyDictionary[Sequence, list[torch.Tensor]] = WeakKeyDictionary()

    def of(self, layer: int, sequence: Sequence, first: int, stop: int) -> torch.Tensor:
        """Return the keys of some rows of a layer's tail.

        Parameters
        ----------
        layer, sequence
            Whose tail.
        first, stop
            Rows of it.

        Returns
        -------
        float16 (stop - first, kv_heads, head_dim): the memory itself, or converted from bfloat16.
        """
        known = self._known.get(sequence)
        if known is None:
            known = [self._layout.keys(torch.from_numpy(tail)) for tail in sequence.tails]
            self._known[sequence] = known
        keys = known[layer][first:stop]
        return keys if keys.dtype is torch.float16 else keys.half()
