# SPDX-License-Identifier: Apache-2.0
"""A decode step a part after the other in Python, as the native library does it in one call."""

from contextlib import closing

import numpy as np

from hillinfer.engine.decode_step import NativeDecode
from hillinfer.native.structures import row_addresses
from hillinfer.trace.recorder import Lane
from hillinfer_bench.precision.in_place_attention import InPlaceAttention


class PythonDecode(NativeDecode):
    """What tests compare the native step with: nothing is chosen over tables or found at once."""

    def __init__(self, runtime):
        self.__dict__.update(runtime.decode.__dict__)
        self.attention = InPlaceAttention(runtime.shape)

    @classmethod
    def instead(cls, runtime):
        """Let a runtime decode so."""
        runtime.decode, runtime.joined = cls(runtime), None

    def step(self, *given):
        """Leave the choice to `TokenSelection`; see `NativeDecode.step`."""

    def keep(self, *given):
        """Keep nothing for a layer's turn; see `NativeDecode.keep`."""
        return False

    def choose_next(self, *given):
        """Leave the choice to `TokenSelection`; see `NativeDecode.choose_next`."""

    def attend(self, layer, sequence, query, sets, scaling, step, landed):
        """Copy rows run by run, then attend to the copies; see `NativeDecode.attend`."""
        if not 0 < len(sets[0]) < sequence.lengths[layer]:
            return None
        rows = np.unique(np.concatenate(sets))
        copies = np.empty((len(rows), self.attention.shape.row_bytes), np.uint8)
        copied = 0
        with closing(self._gather.in_place(layer, sequence, rows, step, landed)) as runs:
            for run in runs:
                self._library.copy_rows(run, copies[copied:])
                copied += len(run)
        addresses = [row_addresses(copies, np.searchsorted(rows, one)) for one in sets]
        with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
            out = self.attention.attend(query[:, 0], scaling, addresses)
        return out[:, None].to(query.dtype)
