# SPDX-License-Identifier: Apache-2.0
"""The format of a recorded trace of selected sets; needs no model's code to load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hillinfer.settings import Settings

Sets = tuple[NDArray[np.int32], ...]


@dataclass(frozen=True)
class SelectionTrace:
    """What each layer selected in consecutive decode steps of one sequence.

    Parameters
    ----------
    text
        Name of the text.
    settings
        α, rule, shadow and kept tokens that made the sets; the scope is a layer.
    prefix
        Tokens that were read densely before the first step.
    layers
        Per layer and step, int32 positions, ascending, kept tokens included. Step i selects from
        `prefix` + i + 1 tokens.
    observed
        Per layer, the sets that the last queries of the prefix would have selected.
    """

    text: str
    settings: Settings
    prefix: int
    layers: tuple[Sets, ...]
    observed: tuple[Sets, ...]

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.layers[0])

    @property
    def selected(self) -> int:
        """Selected tokens of all layers and steps, kept tokens included."""
        return sum(len(positions) for sets in self.layers for positions in sets)
