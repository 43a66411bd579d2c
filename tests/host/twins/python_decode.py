# SPDX-License-Identifier: Apache-2.0
"""A decode step a part after the other in Python, as the native library does it in one call."""

from contextlib import closing

from hillinfer.attention.native import NativeAttention
from hillinfer.engine.decode_step import NativeDecode
from hillinfer.trace.recorder import Lane


class PythonDecode(NativeDecode):
    """What tests compare the native step with: nothing is chosen over tables or found at once."""

    @classmethod
    def instead(cls, runtime):
        """Let a runtime decode so."""
        own = object.__new__(cls)
        own.__dict__.update(runtime.decode.__dict__)
        own.attention = NativeAttention(runtime.shape)
        runtime.decode = own

    def step(self, *given):
        """Leave the choice to `TokenSelection`; see `NativeDecode.step`."""

    def choose_next(self, *given):
        """Leave the choice to `TokenSelection`; see `NativeDecode.choose_next`."""

    def attend(self, layer, sequence, query, positions, scaling, step, landed):
        """Attend to rows run by run; see `NativeDecode.attend`."""
        if not 0 < len(positions) < sequence.lengths[layer]:
            return None
        tile_rows = self._library.tile_rows
        softmax = self.attention.begin(query[:, 0], scaling)
        runs = self._gather.in_place(layer, sequence, positions, step, landed, tile_rows)
        with closing(runs):
            for run in runs:
                with self._recorder.span(Lane.COMPUTE, "attention", layer=layer):
                    softmax.add([run])
        return softmax.result()[:, None].to(query.dtype)
