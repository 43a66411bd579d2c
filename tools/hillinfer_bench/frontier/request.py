# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench frontier` was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.system.machine import NumberType
from hillinfer_bench.frontier.equal import TOLD_KLS
from hillinfer_bench.frontier.swept import CODED, HILLINFER, SWEPT
from hillinfer_bench.quality.texts import TextsRequest
from hillinfer_bench.systems.shapes import SHAPES, BenchShape


@dataclass(frozen=True)
class TimedPlan:
    """Where times are taken.

    Parameters
    ----------
    real_context
        Tokens of the real model's text before its first timed step; 0 takes none of it.
    shapes
        Names of shapes with random weights.
    shape_context
        Tokens of theirs.
    real_budget, shape_budget
        M0 as a share of the KV.
    steps
        Measured steps of each system; 0 takes no times at all.
    shape_type
        What shapes compute in.
    shape_layers
        Layers of theirs that are built, at most. The first two never have a predicted query, so
        that fewer say less of the whole model. In memory, where nothing waits for a prediction,
        they are half as many: all rows of several caches lie there.
    real_kls, shape_kls
        Where times of the real model and of shapes are taken, too, beside HillInfer's own KL.

    Raises
    ------
    SettingsError
        Where a value is outside its range; the message names it.
    """

    real_context: int = 7936
    shapes: tuple[str, ...] = ()
    shape_context: int = 32_768
    real_budget: float = 0.25
    shape_budget: float = 0.2
    steps: int = 12
    shape_type: NumberType = NumberType.AUTO
    shape_layers: int = 12
    real_kls: tuple[float, ...] = TOLD_KLS
    shape_kls: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        for name in ("real_context", "steps"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} must not be negative")
        if self.shape_layers < 1:
            raise SettingsError(f"shape_layers={self.shape_layers} must be above 0")
        if self.shape_context < 1 or min(self.real_budget, self.shape_budget) <= 0:
            raise SettingsError(
                f"shape_context={self.shape_context}, budgets {self.real_budget}, "
                f"{self.shape_budget}: all must be above 0"
            )
        for name in self.shapes:
            if name not in SHAPES:
                raise SettingsError(f"shape={name!r}: choose one of {', '.join(SHAPES)}")
        for kl in self.kls:
            if not 0 < kl < 1:
                raise SettingsError(f"KL {kl:g}: times are taken at one between 0 and 1")

    @property
    def kls(self) -> tuple[float, ...]:
        """All KLs that settings are interpolated for, beside HillInfer's own."""
        return tuple(dict.fromkeys((*TOLD_KLS, *self.real_kls, *self.shape_kls)))

    def built(self, name: str) -> BenchShape:
        """Return a shape with the layers that are built of it."""
        shape = SHAPES[name]
        return replace(shape, layers=min(shape.all_layers, self.shape_layers))

    def built_in_memory(self, name: str) -> BenchShape:
        """Return a shape with the layers that are built of it where all rows lie in memory."""
        shape = self.built(name)
        return replace(shape, layers=max(1, shape.layers // 2))


@dataclass(frozen=True)
class FrontierRequest:
    """Options of one run.

    Parameters
    ----------
    texts
        Model, texts and where the report goes; its α are not used.
    systems
        Names of those that are swept; all where empty. HillInfer's own two always are.
    timed
        Where times are taken.
    cold_dir
        Directory on the drive; None for the user's cache directory.

    Raises
    ------
    SettingsError
        Where a system is none of the table.
    """

    texts: TextsRequest
    systems: tuple[str, ...] = ()
    timed: TimedPlan = TimedPlan()
    cold_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuse names that are not there."""
        for name in self.systems:
            if name not in SWEPT:
                raise SettingsError(f"system={name!r}: choose one of {', '.join(SWEPT)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are swept, in the order of the table."""
        wanted = {*self.systems, CODED, HILLINFER} if self.systems else set(SWEPT)
        return tuple(name for name in SWEPT if name in wanted)

    @property
    def out(self) -> Path:
        """Where the report goes."""
        assert self.texts.out is not None
        return self.texts.out

    @property
    def rows_file(self) -> Path:
        """Where the sweep's rows are kept as they come."""
        return self.out.with_name(f"{self.out.stem}-rows.jsonl")

    @property
    def times_file(self) -> Path:
        """Where the times of each model are kept."""
        return self.out.with_name(f"{self.out.stem}-times.jsonl")
