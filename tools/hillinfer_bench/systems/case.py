# SPDX-License-Identifier: Apache-2.0
"""One point of the benchmark, and what every system of it is opened with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.errors import SettingsError
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType, ProcessorFacts
from hillinfer_bench.replay.selection_trace import SelectionTrace
from hillinfer_bench.systems.shapes import SHAPES, BenchShape
from hillinfer_model.choices import KeyMode
from hillinfer_model.selection import kept_positions

REAL, MODELLED = "measured selection", "modelled selection"


@dataclass(frozen=True)
class Case:
    """What every system of one comparison is given.

    Parameters
    ----------
    model
        Name in the table of shapes, for random weights; else a model of a user, with a real text.
    context
        Tokens before the first decode step.
    systems
        Names of systems, HillInfer's settings and rivals.
    batch
        Sequences.
    alpha
        Importance rate of all that select.
    budget_share
        M0 of all that keep one, as a share of the KV of this context.
    shadow
        HillInfer's; `auto` for INT4, or INT2 where that leaves too little for rows.
    steps, warm_up
        Decode steps that are measured, and those before them that are not.
    turn
        Steps of one system before the next one's turn.
    part
        Of the plan, where it has the same values twice for other systems; empty elsewhere.

    Raises
    ------
    SettingsError
        Where a value is outside its range; the message names it.
    """

    model: str
    context: int
    systems: tuple[str, ...]
    batch: int = 1
    alpha: float = 0.1
    budget_share: float = 0.2
    shadow: str = "auto"
    steps: int = 32
    warm_up: int = 8
    turn: int = 4
    part: str = ""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name in ("context", "batch", "steps", "turn"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.warm_up < 0 or not self.budget_share > 0:
            raise SettingsError(
                f"warm_up={self.warm_up}, budget_share={self.budget_share}: the one must not be "
                "negative, the other must be above 0"
            )
        if not self.systems:
            raise SettingsError("no system is left to measure: check --systems")
        self.settings()

    @property
    def all_steps(self) -> int:
        """Decode steps of each system, warm-up included."""
        return self.warm_up + self.steps

    @property
    def name(self) -> str:
        """What tells the case from others, in one line."""
        return (
            f"{self.model} {self.context} tokens, batch {self.batch}, α {self.alpha:g}, "
            f"budget {100 * self.budget_share:.12g}%, shadow {self.shadow}"
            + (f", {self.part}" if self.part else "")
        )

    def settings(self) -> Settings:
        """Return HillInfer's settings but for the budget."""
        return Settings().changed(alpha=self.alpha, shadow=self.shadow)


class Selections:
    """Which tokens each layer of each sequence selects at which length.

    Parameters
    ----------
    trace
        Sets per step, of all layers of the first sequence, then of the next one.
    layers
        Layers of the model.
    best
        The same with fewer tokens, the best of them; None where no token is told from others.
    """

    def __init__(
        self, trace: SelectionTrace, layers: int, best: SelectionTrace | None = None
    ) -> None:
        self._trace = trace
        self._layers = layers
        self._best = best
        self._exact: dict[tuple[int, int], dict[tuple[int, int], NDArray[np.int64]]] = {}

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
        return self._of(self._trace, layer, row, length)

    def with_best(self, best: SelectionTrace) -> Selections:
        """Return the same, its best tokens told from the others."""
        return Selections(self._trace, self._layers, best)

    def exact(self, layer: int, row: int, length: int, count: int) -> NDArray[np.int64]:
        """Return the best of the selected positions, int64 ascending, kept tokens among them.

        Then those of `best` that are selected, then the others; of each the newest first.

        Parameters
        ----------
        layer, row, length
            As in `positions`.
        count
            How many: no more than are selected, no fewer than are kept.
        """
        own = self._exact.setdefault((layer, row), {})
        if (length, count) not in own:
            # All steps of a layer at once, in its warm-up: later ones are timed.
            first = self._trace.prefix + 1
            wanted = [length] if own else range(first, first + self._trace.steps)
            own |= {(one, count): self._best_of(layer, row, one, count) for one in wanted}
        return own[length, count]

    def _best_of(self, layer: int, row: int, length: int, count: int) -> NDArray[np.int64]:
        settings, chosen = self._trace.settings, self.positions(layer, row, length)
        rank = 2 * np.isin(
            chosen, kept_positions(length, settings.kept_sinks, settings.kept_recent)
        )
        if self._best is not None:
            rank = rank + np.isin(chosen, self._of(self._best, layer, row, length))
        return np.sort(chosen[np.lexsort((chosen, rank))[len(chosen) - count :]])

    def _of(self, trace: SelectionTrace, layer: int, row: int, length: int) -> NDArray[np.int64]:
        step = length - trace.prefix - 1
        if not 0 <= step < trace.steps:
            raise SettingsError(
                f"no selection of a context of {length}: {trace.steps} steps after "
                f"{trace.prefix} tokens were recorded; record more"
            )
        return trace.layers[row * self._layers + layer][step].astype(np.int64)


@dataclass(frozen=True)
class BenchSetting:
    """A model that HillInfer is attached to, and what its caches may take.

    Parameters
    ----------
    case
        What is measured.
    model
        A causal language model of transformers, attached.
    shape
        Of its KV cache.
    budget_bytes
        M0 of all systems that keep one.
    cold_dir
        Existing directory on the drive.
    selections
        What systems that select are made to select; None where they choose by themselves.
    all_layers
        Layers of the whole model, where `shape` has only some of them; 0 where it has all.
    trace
        File that HillInfer's own system writes its lanes to; None for none.
    calls
        How rivals reach the drive.
    """

    case: Case
    model: Any
    shape: ModelShape
    budget_bytes: int
    cold_dir: Path
    selections: Selections | None
    all_layers: int = 0
    trace: Path | None = None
    calls: DriveCalls = field(default_factory=DriveCalls)

    @property
    def whole(self) -> BenchSetting:
        """The same with all layers, and their budget: what a user of the model would plan."""
        layers = self.all_layers or self.shape.layers
        if layers == self.shape.layers:
            return self
        shape = replace(self.shape, layers=layers)
        return replace(self, shape=shape, budget_bytes=budget_bytes(self.case, shape, layers))

    @property
    def tokens(self) -> int:
        """Tokens of each sequence at the end."""
        return self.case.context + self.case.all_steps

    @property
    def kv_bytes(self) -> int:
        """Rows of all sequences at the end."""
        return self.tokens * self.case.batch * self.shape.token_bytes


def budget_bytes(case: Case, shape: ModelShape, all_layers: int) -> int:
    """Return M0 in bytes, the same for every system.

    Where only some layers of a model are built, they get their part of what the whole model's
    budget leaves beside HillInfer's staging, and the staging, which a model has once.

    Parameters
    ----------
    case
        Names the share.
    shape
        Of the layers that are built.
    all_layers
        Layers of the whole model.
    """
    rows = (case.context + case.all_steps) * case.batch
    whole = int(case.budget_share * rows * all_layers * shape.row_bytes)
    staging = staging_bytes(shape, replace(case.settings(), shadow=KeyMode.INT4))
    if all_layers == shape.layers or whole <= staging:
        return int(case.budget_share * rows * shape.token_bytes)
    return staging + (whole - staging) * shape.layers // all_layers


def table_type(number_type: NumberType) -> torch.dtype:
    """Return the type of models with random weights: that of bfloat16 weights."""
    return number_type.resolve(torch.bfloat16, "cpu", ProcessorFacts.read())


def case_setting(
    case: Case,
    model: Any,
    real_shape: ModelShape | None,
    positions: int,
    cold_dir: Path,
    trace: Path | None = None,
    built: BenchShape | None = None,
) -> BenchSetting:
    """Return what systems are opened with, but for selections.

    Parameters
    ----------
    case
        What is measured.
    model
        The model, or something that has its `dtype`.
    real_shape
        Of the real model; None for one of the table of shapes.
    positions
        Of the model.
    cold_dir
        Existing directory on the drive.
    trace
        File that HillInfer's own system writes its lanes to; None for none.
    built
        What is built of one of the table of shapes; as the table has it where None.
    """
    if real_shape:
        shape, all_layers = real_shape, real_shape.layers
    else:
        built = built or SHAPES[case.model]
        shape, all_layers = built.kv_shape(positions, model.dtype), built.all_layers
    return BenchSetting(
        case=case,
        model=model,
        shape=shape,
        budget_bytes=budget_bytes(case, shape, all_layers),
        cold_dir=cold_dir,
        selections=None,
        all_layers=all_layers,
        trace=trace,
    )
