# SPDX-License-Identifier: Apache-2.0
"""A runtime that does all its work and attends to recorded selections."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hillinfer.model_shape import ModelShape
from hillinfer.runtime import Runtime
from hillinfer.settings import Settings
from hillinfer.storage.sequence import Sequence
from hillinfer_bench.decode.replayed_evaluation import ReplayedEvaluation
from hillinfer_bench.decode.selections import Selections


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
        self._opened: list[Sequence] = []
        evaluate = partial(ReplayedEvaluation, selections=selections, sequences=self._opened)
        super().__init__(shape, settings, budget_bytes, cold_dir, evaluate=evaluate, **options)

    def open_sequence(self) -> Sequence:
        """Return a new, empty sequence; see `Runtime`."""
        sequence = super().open_sequence()
        self._opened.append(sequence)
        return sequence
