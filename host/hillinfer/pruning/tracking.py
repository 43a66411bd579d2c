# SPDX-License-Identifier: Apache-2.0
"""Keeps pruning state true to its cache after crops, broken passes and tokens read unpruned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.pruning.decoding import BlockManager
from hillinfer.pruning.passes import Document, LaterTurns, Pass, StagedCache


class DocumentTracker:
    """Brings what is known of a cache, and its deeper layers, to what became of the cache.

    Parameters
    ----------
    bands
        The layers of each band behind the first cut.
    blocks
        Moves blocks while tokens are decoded.
    later
        What a turn behind an answer does.
    """

    def __init__(self, bands: Sequence[range], blocks: BlockManager, later: LaterTurns) -> None:
        self._bands, self._blocks, self._later = bands, blocks, later

    def empty(self, document: Document, cache: StagedCache) -> None:
        """Forget what deeper layers were brought: they are read anew by what comes."""
        brought = document.boundary.brought
        document.positions, document.read, document.completed = [], None, brought
        document.swapping, document.is_new = None, False
        for band in self._bands:
            cache.restart(band, brought)

    @staticmethod
    def is_as_left(document: Document, cache: StagedCache) -> bool:
        """Whether no pass went into a cache but those of ours, as far as anybody counts them."""
        return cache.passes in (None, document.passes, (document.passes or 0) + 1)

    def cut_back(self, document: Document, cache: StagedCache, length: int) -> None:
        """Learn what became of a cache since its last pass, in the deeper layers, too."""
        if not self.is_as_left(document, cache):
            # Others used it: tokens that came are in every band, and their states are not here.
            document.boundary, document.windows = document.boundary.forgotten(), {}
            # Nobody knows what each of them attended to.
            document.dense = 0
        elif length > document.length:
            raise UnsupportedFeatureError(
                f"prune: the cache has {length} tokens, of which {document.length} were read in "
                "stages: use it with this model alone, or begin with an empty one"
            )
        document.boundary = document.boundary.first(length)
        if document.is_new and self._later is LaterTurns.KEEP and length < document.length:
            # The prompt's last pass did not count, nor does what it chose.
            self.empty(document, cache)
        document.is_new = False
        if length < document.completed:
            self.empty(document, cache)
        if length > document.length:
            new = torch.arange(document.length, length)
            document.positions = [torch.cat([one, new.to(one)]) for one in document.positions]
        self._blocks.cut_back(document, length)
        if any(_lies_apart(one, length) for one in document.positions):
            # Rows of blocks that entered lay behind what was cut, and went with it.
            self.empty(document, cache)
        needed = self._later.chooses or document.is_pending
        if not needed and document.swapping is None:
            document.boundary = document.boundary.forgotten()
        document.length, document.dense = length, min(document.dense, length)
        for number, (positions, layers) in enumerate(
            zip(document.positions, self._bands, strict=False)
        ):
            document.positions[number] = left = positions[positions < length]
            if min(map(cache.length, layers)) < len(left):
                self._lose(document, length)
                return
            cache.shorten(layers, len(left))

    def _lose(self, document: Document, length: int) -> None:
        """Go on where a cache was cropped, which takes as many rows from layers that have fewer."""
        if self._later is LaterTurns.KEEP:
            raise UnsupportedFeatureError(
                f"prune: the cache was cropped to {length} tokens, and its deeper layers lost as "
                'many rows, of tokens that are still there: use later="anew", which reads them '
                "again, or begin with an empty cache"
            )
        # Whatever comes next, they are read anew.
        document.positions, document.read = [], None

    def undo(self, now: Pass) -> None:
        """Leave a cache as it was before a pass that broke off."""
        document, held = now.document, now.held
        document.length, document.waits = now.before, held.waits
        document.boundary = held.boundary
        document.positions, document.dense = held.positions, held.dense
        document.windows, document.is_new = held.windows, held.is_new
        self._blocks.undo(now)
        now.cache.undo(range(self._bands[0].start), now.before)
        if now.emptied or not document.positions:
            # Deeper layers have nothing any more; they are read anew by what comes.
            document.waits = document.waits and not now.emptied
            self.empty(document, now.cache)
            return
        for layers, positions in zip(self._bands, document.positions, strict=True):
            now.cache.undo(layers, len(positions))


def _lies_apart(positions: torch.Tensor, length: int) -> bool:
    """Whether tokens from `length` on have rows before those of earlier tokens."""
    left = positions[positions < length]
    return not torch.equal(left, positions[: len(left)])
