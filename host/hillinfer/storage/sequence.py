# SPDX-License-Identifier: Apache-2.0
"""One sequence's tokens and where its rows and shadow lie."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.pools.hit_rate_table import HitRateTable
from hillinfer.storage.segment import Segment
from hillinfer_model.kernel_spec import GROUP_TOKENS


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
        self._group_table: NDArray[np.int64] = np.zeros(0, np.int64)
        self.tails = np.zeros((layers, GROUP_TOKENS, row_bytes), np.uint8)
        # Tails stay where they are, and asking numpy takes long.
        self._tail_addresses = [
            self.tails.ctypes.data + layer * GROUP_TOKENS * row_bytes for layer in range(layers)
        ]
        self._row_bytes = np.uint64(row_bytes)
        # Position of the first row in `tails`, layer by layer.
        self.held_starts = [0] * layers
        self.segments: list[Segment] = []
        self.hits = HitRateTable(layers)
        # Queries of the last prefill tokens, float32 (queries, query_heads, head_dim), until what
        # they select is counted.
        self.observed: list[torch.Tensor | None] = [None] * layers

    def tail_start(self, layer: int) -> int:
        """Return the position of the open group's first token in a layer."""
        return self.lengths[layer] // GROUP_TOKENS * GROUP_TOKENS

    def tail_addresses(self, layer: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return where the rows of ascending positions in a layer's tail lie, uint64.

        Raises
        ------
        IndexError
            A position is not held there.
        """
        first = self.held_starts[layer]
        if len(positions) and not (
            first <= positions[0] and positions[-1] < min(self.lengths[layer], first + GROUP_TOKENS)
        ):
            raise IndexError(f"positions {positions[0]} to {positions[-1]} from {first} on")
        addresses = (positions - first).astype(np.uint64)
        addresses *= self._row_bytes
        addresses += np.uint64(self._tail_addresses[layer])
        return addresses

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row numbers of positions in full groups, int64 of the same shape."""
        table = self._group_table
        if len(table) != len(self.groups):
            table = self._group_table = np.asarray(self.groups, np.int64)
        return table[positions // GROUP_TOKENS] * GROUP_TOKENS + positions % GROUP_TOKENS

    def drop_groups(self, keep: int) -> None:
        """Forget all groups but the first `keep`."""
        del self.groups[keep:]
        # Others may come in their places before anyone asks for rows.
        self._group_table = np.zeros(0, np.int64)
