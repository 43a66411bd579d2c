# SPDX-License-Identifier: Apache-2.0
"""Selected sets that a measurement replays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hillinfer.errors import SettingsError
from hillinfer_bench.replay.selection_trace import SelectionTrace


class Selections:
    """Which tokens each layer of each sequence selects at which length.

    Parameters
    ----------
    trace
        Sets per step, of all layers of the first sequence, then of the next one.
    layers
        Layers of the model.
    """

    def __init__(self, trace: SelectionTrace, layers: int) -> None:
        self._trace = trace
        self._layers = layers

    def positions(self, layer: int, row: int, length: int) -> NDArray[np.int64]:
        """Return the selected positions, int64 ascending.

        Parameters
        ----------
        layer, row
            Which layer of which sequence.
        length
            Tokens of the sequence, this step's own included.

        Raises
        ------
        SettingsError
            Where the trace has no such step.
        """
        trace = self._trace
        step = length - trace.prefix - 1
        if not 0 <= step < trace.steps:
            raise SettingsError(
                f"no selection of a context of {length}: {trace.steps} steps after "
                f"{trace.prefix} tokens were recorded; record more"
            )
        return trace.layers[row * self._layers + layer][step].astype(np.int64)
