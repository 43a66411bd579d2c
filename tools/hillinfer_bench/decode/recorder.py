# SPDX-License-Identifier: Apache-2.0
"""Selections of a real model, for contexts and shapes that it does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hillinfer.models.loader import LoadedModel
from hillinfer.settings import Settings
from hillinfer_bench.decode.locality_check import LocalityCheck
from hillinfer_bench.decode.selections import Selections
from hillinfer_bench.quality.attention import selecting
from hillinfer_bench.quality.prefix import Prefix
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.replay.recording import record_selections
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.replay.stretching import recording_settings, stretched_trace
from hillinfer_bench.systems.system import BenchError
from hillinfer_model.choices import KeyMode


class SelectionRecorder:
    """Records what a model selects after one text, and stretches it to longer contexts.

    Parameters
    ----------
    loaded
        The model, not attached.
    sample
        The text.
    context
        Tokens that are read densely; what follows them is decoded.

    Attributes
    ----------
    checks
        For the report: what every stretched selection was compared with; see `LocalityCheck`.
    """

    def __init__(self, loaded: LoadedModel, sample: TextSample, context: int) -> None:
        self._loaded = loaded
        self._sample = sample
        self._context = context
        self._prefix: Prefix | None = None
        self.checks: list[dict[str, Any]] = []

    def selections(
        self, settings: Settings, context: int, steps: int, layers: int, batch: int
    ) -> Selections:
        """Return selections for another context.

        Layers replay recorded layers spread evenly over the model's depth; the next sequence of a
        batch replays the recorded layers after those.

        Parameters
        ----------
        settings
            α, rule and kept tokens; where the shadow is to be chosen, INT4 records.
        context, steps
            Tokens before the first step, and steps.
        layers, batch
            Of the model that replays.

        Raises
        ------
        BenchError
            Where the result is not as local as the recording, or more steps are asked for than
            the text has.
        """
        settings = replace(settings, shadow=settings.shadow or KeyMode.INT4)
        recorded = self._record(recording_settings(settings, self._context, context, steps), steps)
        deep = len(recorded.layers)
        first = [int((layer + 0.5) * deep / layers) for layer in range(layers)]
        sources = [(one + row) % deep for row in range(batch) for one in first]
        stretched = stretched_trace(recorded, context, settings, sources)
        check = LocalityCheck.of(recorded, stretched, sources)
        self.checks.append(check.record)
        if check.fault is not None:
            raise BenchError(
                f"selections stretched from {recorded.prefix} to {stretched.prefix} tokens are not "
                f"as local as recorded: {check.fault}"
            )
        return Selections(stretched, layers)

    def _record(self, settings: Settings, steps: int) -> SelectionTrace:
        end = self._context + steps
        if end > len(self._sample.token_ids):
            raise BenchError(
                f"{self._sample.name} has {len(self._sample.token_ids)} tokens: {steps} steps "
                f"after {self._context} need {end}"
            )
        if self._prefix is None:
            self._prefix = Prefix.read(self._loaded.model, self._sample.token_ids[: self._context])
        with selecting(self._loaded.model):
            return record_selections(
                self._loaded.model,
                self._prefix,
                self._sample.token_ids[:end],
                settings,
                self._sample.name,
                0,
            )
