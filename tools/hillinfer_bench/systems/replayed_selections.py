# SPDX-License-Identifier: Apache-2.0
"""Selections of a real model, replayed at contexts and shapes that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.engine.runtime import Runtime
from hillinfer.kv.sequence import Sequence as StoredSequence
from hillinfer.model_shape import ModelShape
from hillinfer.models.loader import LoadedModel
from hillinfer.scoring.scorer import ImportanceEvaluation, Scorer, SegmentShadow, Split
from hillinfer.settings import Settings
from hillinfer_bench.quality.forced_reading import Prefix, selecting
from hillinfer_bench.quality.texts import TextSample
from hillinfer_bench.replay.recording import record_selections
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.systems.case import Selections
from hillinfer_bench.systems.stretching import (
    LOCALITY_TOLERANCE,
    Locality,
    recording_settings,
    stretched_trace,
)
from hillinfer_bench.systems.system import BenchError
from hillinfer_model.choices import KeyMode


@dataclass(frozen=True)
class LocalityCheck:
    """Each recorded layer that is replayed, compared by itself with what was made of it.

    Layers that replay the same recorded one have the same sets, in any sequence, so each recorded
    layer is compared once.

    Parameters
    ----------
    record
        For the report: what was checked, the figures of each layer and their means.
    fault
        The first layer that differs, and how; None where none does.
    """

    record: dict[str, Any]
    fault: str | None

    @classmethod
    def of(
        cls, recorded: SelectionTrace, stretched: SelectionTrace, sources: Sequence[int]
    ) -> LocalityCheck:
        """Compare all of them.

        Parameters
        ----------
        recorded, stretched
            Before and after.
        sources
            For each layer of all sequences, the recorded layer that it replays.
        """
        own = sorted(set(sources))
        before = [Locality.of(_layer(recorded, source)) for source in own]
        after = [Locality.of(_layer(stretched, sources.index(source))) for source in own]
        differences = [
            f"recorded layer {source}: {difference}"
            for source, one, other in zip(own, after, before, strict=True)
            if (difference := one.difference(other)) is not None
        ]
        record = {
            "text": recorded.text,
            "recorded_tokens": recorded.prefix,
            "context": stretched.prefix,
            "alpha": stretched.settings.importance_rate,
            "checked": f"each of the {len(own)} recorded layers that {len(sources)} layers of all "
            f"sequences replay, by itself, in all {recorded.steps} steps",
            "recorded": _mean(before).as_record(),
            "stretched": _mean(after).as_record(),
            "layers": [
                {"layer": source, "recorded": one.as_record(), "stretched": other.as_record()}
                for source, one, other in zip(own, before, after, strict=True)
            ],
            "tolerance": LOCALITY_TOLERANCE,
        }
        return cls(record, differences[0] if differences else None)


def _layer(trace: SelectionTrace, layer: int) -> SelectionTrace:
    return replace(trace, layers=(trace.layers[layer],), observed=((),))


def _mean(layers: Sequence[Locality]) -> Locality:
    return Locality(
        *(
            sum(getattr(one, field.name) for one in layers) / len(layers)
            for field in fields(Locality)
        )
    )


Stretch = Callable[[SelectionTrace, int, Settings, Sequence[int]], SelectionTrace]


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
        # Of each importance rate: a second shape of the same context replays the same recording.
        self._recorded: list[tuple[Settings, int, SelectionTrace]] = []
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
        wanted = recording_settings(settings, self._context, context, steps)
        return self.stretched(self._record(wanted, steps), settings, context, layers, batch)

    def ranked_selections(
        self, settings: Settings, exact: float, context: int, steps: int, layers: int, batch: int
    ) -> Selections:
        """Return selections whose best tokens are told from the others.

        The best are recorded like the others, with an importance rate that selects only them. How
        local they are is told in `checks` and refuses nothing: they are few.

        Parameters
        ----------
        settings, context, steps, layers, batch
            As in `selections`, whose errors it raises.
        exact
            Share of the tokens that are the best.
        """
        settings = replace(settings, shadow=settings.shadow or KeyMode.INT4)
        wanted = recording_settings(settings, self._context, context, steps)
        trace = self.stretched(self._record(wanted, steps), settings, context, layers, batch)
        few = replace(settings, alpha=min(settings.importance_rate, exact))
        recorded = self._record(recording_settings(few, self._context, context, steps), steps)
        sources = self._sources(recorded, layers, batch)
        best = stretched_trace(recorded, context, few, sources)
        self.checks.append(LocalityCheck.of(recorded, best, sources).record)
        return trace.with_best(best)

    @staticmethod
    def _sources(recorded: SelectionTrace, layers: int, batch: int) -> list[int]:
        deep = len(recorded.layers)
        first = [int((layer + 0.5) * deep / layers) for layer in range(layers)]
        return [(one + row) % deep for row in range(batch) for one in first]

    def stretched(
        self,
        recorded: SelectionTrace,
        settings: Settings,
        context: int,
        layers: int,
        batch: int,
        stretch: Stretch = stretched_trace,
    ) -> Selections:
        """Return a recording laid out over another context, once it was found to be as local.

        Parameters
        ----------
        recorded
            Of the real model.
        settings, context, layers, batch
            As in `selections`.
        stretch
            Lays it out.

        Raises
        ------
        BenchError
            As in `selections`.
        """
        sources = self._sources(recorded, layers, batch)
        made = stretch(recorded, context, settings, sources)
        check = LocalityCheck.of(recorded, made, sources)
        self.checks.append(check.record)
        if check.fault is not None:
            raise BenchError(
                f"selections stretched from {recorded.prefix} to {made.prefix} tokens are not "
                f"as local as recorded: {check.fault}"
            )
        return Selections(made, layers)

    def _record(self, settings: Settings, steps: int) -> SelectionTrace:
        for known, count, trace in self._recorded:
            if (known, count) == (settings, steps):
                return trace
        trace = self._read(settings, steps)
        self._recorded.append((settings, steps, trace))
        return trace

    def _read(self, settings: Settings, steps: int) -> SelectionTrace:
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


class ReplayedEvaluation(ImportanceEvaluation):
    """Scores and ranks as ever, then selects what was recorded.

    Which layer and sequence is asked for is told by the statistics of the first segment, of which
    every layer of every sequence has its own.

    Parameters
    ----------
    scorer, settings
        As for `ImportanceEvaluation`.
    selections
        What is selected.
    sequences
        Those there are, in the order in which they replay.
    """

    def __init__(
        self,
        scorer: Scorer,
        settings: Settings,
        selections: Selections,
        sequences: list[StoredSequence],
    ) -> None:
        super().__init__(scorer, settings)
        self._selections = selections
        self._sequences = sequences

    @property
    def table_variant(self) -> None:
        """None: what is scored here is not what is selected."""
        return

    def select(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int = 0,
        lacking: int = 0,
    ) -> list[NDArray[np.int64]]:
        """Score all tokens there are, then return the recorded set; see `ImportanceEvaluation`."""
        own = super().select(query, scaling, segments, coming, lacking)
        return self._replayed(segments, coming, len(own))

    def split(
        self,
        query: torch.Tensor,
        scaling: float,
        segments: Sequence[SegmentShadow],
        coming: int,
        lacking: int = 0,
    ) -> Split:
        """Score all tokens, then return the recorded set and the best of it."""
        own = super().split(query, scaling, segments, coming, lacking)
        layer, row = self._place(segments[0].statistics)
        length = segments[-1].base_position + segments[-1].tokens + coming
        exact = self._selections.exact(layer, row, length, len(own.exact[0]))
        return Split(self._replayed(segments, coming, len(own.sets)), [exact] * len(own.exact))

    def _replayed(
        self, segments: Sequence[SegmentShadow], coming: int, sets: int
    ) -> list[NDArray[np.int64]]:
        layer, row = self._place(segments[0].statistics)
        length = segments[-1].base_position + segments[-1].tokens + coming
        return [self._selections.positions(layer, row, length)] * sets

    def _place(self, statistics: object) -> tuple[int, int]:
        for row, sequence in enumerate(self._sequences):
            for layer, own in enumerate(sequence.segments[0].layers):
                if own.statistics is statistics:
                    return layer, row
        raise AssertionError("segments are scored of a sequence that was not opened here")


class ReplayingRuntime(Runtime):
    """Scores as ever, and takes a replayed set in place of the selected one.

    Sequences replay in the order in which they were opened.

    Parameters
    ----------
    shape, settings, budget_bytes, cold_dir, options
        As for `Runtime`.
    selections
        What is attended to.
    """

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        budget_bytes: int,
        cold_dir: Path,
        selections: Selections,
        **options: Any,
    ) -> None:
        self._opened: list[StoredSequence] = []
        evaluate = partial(ReplayedEvaluation, selections=selections, sequences=self._opened)
        super().__init__(shape, settings, budget_bytes, cold_dir, evaluate=evaluate, **options)

    def open_sequence(self) -> StoredSequence:
        """Return a new, empty sequence; see `Runtime`."""
        sequence = super().open_sequence()
        self._opened.append(sequence)
        return sequence
