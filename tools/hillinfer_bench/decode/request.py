# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench decode` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads
from hillinfer_bench.decode.plan import Chosen


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
