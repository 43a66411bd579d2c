# SPDX-License-Identifier: Apache-2.0
"""What decoding did with the blocks of a prompt, as it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DecodedBlocks:
    """What decoding did with the blocks of a prompt.

    Parameters
    ----------
    steps
        Decoded tokens so far.
    swaps
        At how many of them blocks moved, at each cut.
    computed, put_back
        Blocks that entered a band for the first time, and those that it had before; where rows stay
        in their place, those that a token attends to and the one before it did not.
    entered_rows
        Rows of both, one for each token and layer of the band.
    deciding_seconds, swapping_seconds
        Ranking blocks, and moving and computing them.
    aside_bytes
        Of rows that left, and of states that enter later bands; without boundary states.
    active
        Numbers of the prompt's blocks that each band has, or that the last token attended to,
        ascending.
    """

    steps: int
    swaps: tuple[int, ...]
    computed: int
    put_back: int
    entered_rows: int
    deciding_seconds: float
    swapping_seconds: float
    aside_bytes: int
    active: tuple[tuple[int, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """Return it by name, as a report has it."""
        return {**vars(self), "swaps": [*self.swaps], "active": [[*one] for one in self.active]}
