# SPDX-License-Identifier: Apache-2.0
"""The keys of open groups, where they lie."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from hillinfer.storage.row_layout import RowLayout
from hillinfer.storage.sequence import Sequence


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
