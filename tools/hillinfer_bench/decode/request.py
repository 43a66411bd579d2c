# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench decode` was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from hillinfer.errors import SettingsError
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads

if TYPE_CHECKING:
    from hillinfer_bench.systems.case import Case


@dataclass(frozen=True)
class Chosen:
    """What a user leaves of a plan; an empty tuple leaves all.

    Parameters
    ----------
    systems, contexts, alphas, models, batches, budgets, shadows
        Values of `Case`.
    steps
        Measured steps of every case; None for those of the plan.

    Raises
    ------
    SettingsError
        Where there would be no steps.
    """

    systems: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()
    alphas: tuple[float, ...] = ()
    models: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    budgets: tuple[float, ...] = ()
    shadows: tuple[str, ...] = ()
    steps: int | None = None

    def __post_init__(self) -> None:
        """Refuse less than a step."""
        if self.steps is not None and self.steps < 1:
            raise SettingsError(f"steps={self.steps} must be at least 1")

    def of(self, case: Case) -> Case | None:
        """Return a case with the chosen systems and steps; None where none of it is left."""
        for field, name in CASE_FIELDS.items():
            wanted = getattr(self, name)
            if wanted and name != "systems" and getattr(case, field) not in wanted:
                return None
        left = tuple(one for one in case.systems if not self.systems or one in self.systems)
        if not left:
            return None
        return replace(case, systems=left, steps=self.steps or case.steps)


# Fields of a case, and what they are called where several are chosen.
CASE_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "systems": "systems",
        "context": "contexts",
        "batch": "batches",
        "alpha": "alphas",
        "budget_share": "budgets",
        "shadow": "shadows",
        "model": "models",
    }
)


@dataclass(frozen=True)
class BenchRequest:
    """Options of one run.

    Parameters
    ----------
    plan
        Its name.
    model
        The model with real weights: it is measured, and its selections are recorded.
    number_type
        What all models compute in.
    chosen
        What is left of the plan.
    threads
        Compute threads; None for one per core.
    cold_dir
        Directory on the drive; None for the user's cache directory.
    out
        Where the JSON goes, pictures beside it.
    trace
        File that the one HillInfer system of the one case writes its lanes to; None for none.

    Raises
    ------
    SettingsError
        Where a value is outside its range; the message names it.
    """

    plan: str
    model: str
    number_type: NumberType
    chosen: Chosen
    threads: int | None
    cold_dir: Path | None
    out: Path
    trace: Path | None = None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded."""
        check_threads(self.threads)
        if self.trace is not None and self.trace.resolve() == self.out.resolve():
            raise SettingsError(f"trace={self.trace} is where the report goes: choose another")
        if self.out.suffix != ".json":
            raise SettingsError(f"out={self.out} is for JSON: give a name that ends with .json")
