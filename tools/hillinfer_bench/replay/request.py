# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench pools` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads


@dataclass(frozen=True)
class PoolsRequest:
    """Options of one run.

    Parameters
    ----------
    model, number_type
        What to load, and the type it computes in.
    texts
        Files; two parts of the Python reference where empty.
    context, last
        Tokens of each text, and how many of them are read sparsely, a decode step each.
    alphas
        Importance rates.
    threads
        Traces recorded or replayed at once; None for one per core.
    out
        Where the JSON goes, and the picture beside it as PNG; None for nowhere.

    Raises
    ------
    SettingsError
        Where a value is outside its range; the message names it.
    """

    model: str
    number_type: NumberType
    texts: tuple[Path, ...]
    context: int
    last: int
    alphas: tuple[float, ...]
    threads: int | None
    out: Path | None

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, before a model is loaded."""
        if not 0 < self.last < self.context:
            raise SettingsError(
                f"last={self.last} must be at least 1 and below context={self.context}"
            )
        check_threads(self.threads)
        if self.out is not None and self.out.suffix == ".png":
            raise SettingsError(f"out={self.out} is for JSON: the picture goes beside it as .png")
        for settings in self.trace_settings():
            if settings.alpha == 1.0:
                raise SettingsError("alpha=1.0 selects everything: give a smaller --alpha")

    def trace_settings(self) -> list[Settings]:
        """Return what is recorded: the default rule and shadow, and the paper's rule in INT8."""
        return [
            Settings().changed(alpha=alpha, rule=rule, shadow=shadow)
            for rule, shadow in (("weight_sum", "int4"), ("raw_sum", "int8"))
            for alpha in self.alphas
        ]
