# SPDX-License-Identifier: Apache-2.0
"""What one run of `hillinfer-bench quality` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer.values import check_threads


@dataclass(frozen=True)
class QualityRequest:
    """Options of one run.

    Parameters
    ----------
    model, number_type
        What to load, and the type it computes in.
    texts
        Files; the default texts where empty.
    context, last
        Tokens of each text, and how many of them are read sparsely.
    alphas
        Importance rates.
    threads
        Compute threads; None for one per core.
    out
        Where the JSON goes; None for nowhere.

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
        for alpha in self.alphas:
            Settings().changed(alpha=alpha)
