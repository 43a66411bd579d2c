# SPDX-License-Identifier: Apache-2.0
"""What sequences have learnt of their rows and pools have not asked for yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hillinfer.pools.hot_pool import HotPool

if TYPE_CHECKING:
    from hillinfer.storage.sequence import Sequence


class UntoldHits:
    """Tells pools what hits are now only once they are about to rank their rows.

    To tell costs as much as looking at every hot row, and as long as all selected rows are hot
    nothing is ranked. Ranks are those of pools that are told at once.

    Parameters
    ----------
    pools
        One per layer.
    """

    def __init__(self, pools: list[HotPool]) -> None:
        self._pools = pools
        # Tokens in full groups and context length of each sequence, the one noted last at the end.
        self._untold: list[dict[Sequence, tuple[int, int]]] = [{} for _ in pools]

    def note(self, layer: int, sequence: Sequence, settled: int, length: int) -> None:
        """Note that a sequence's hits in a layer have changed.

        Parameters
        ----------
        layer, sequence
            Whose hits; they stay as they are until the next note, or `tell` comes first.
        settled, length
            Its tokens in full groups, and its context length N.
        """
        untold = self._untold[layer]
        # Of rows that several sequences share the pool knows what it was told last.
        untold.pop(sequence, None)
        untold[sequence] = settled, length

    def tell(self, layer: int) -> None:
        """Tell a layer's pool everything noted, in that order."""
        untold = self._untold[layer]
        if untold:
            self._untold[layer] = {}
            pool = self._pools[layer]
            for sequence, (settled, length) in untold.items():
                pool.refresh(sequence.rows, settled, sequence.hits.counts[layer], length)

    def tell_of(self, layer: int, sequence: Sequence) -> None:
        """Do so before a sequence's hits or rows change in a way that is not noted."""
        if sequence in self._untold[layer]:
            self.tell(layer)
