# SPDX-License-Identifier: Apache-2.0
"""A decode step a part after the other in Python, as the native library does it in one call."""

from contextlib import closing

from hillinfer.engine.decode_step import NativeDecode


class PythonDecode(NativeDecode):
    """What tests compare the native step with: nothing is chosen over tables or found at once."""

    @classmethod
    def instead(cls, runtime):
        """Let a runtime decode so."""
        own = object.__new__(cls)
        own.__dict__.update(runtime.decode.__dict__)
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
        runs = self._gather.in_place(layer, sequence, positions, step, landed, tile_rows)
        with closing(runs):
            return self._run_by_run(layer, query, scaling, runs)
