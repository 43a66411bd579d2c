# SPDX-License-Identifier: Apache-2.0
"""One point of the benchmark: a model, a context and settings, for every system."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.errors import SettingsError
from hillinfer.settings import Settings

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
