# SPDX-License-Identifier: Apache-2.0
"""The goals beside each peer, in words and as tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from peers.compared import Compared
from peers.crossover import CrossoverKind

_AHEAD = (CrossoverKind.BELOW, CrossoverKind.MEASURED)


class Goal(ABC):
    """An aim in words and as a test."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The aim in words."""

    @abstractmethod
    def met(self, compared: Compared) -> bool | None:
        """Say whether it was reached; None where what was measured cannot tell."""


@dataclass(frozen=True)
class AheadFrom(Goal):
    """Faster at every context that was asked for from `context` tokens on."""

    context: int

    @property
    def text(self) -> str:
        """The aim in words."""
        return f"ahead at every context from {self.context}"

    def met(self, compared: Compared) -> bool | None:
        """Say no for one context that is behind, yes only where all are known and ahead."""
        known = {
            context: ratio
            for context, ratio in compared.speedups.items()
            if context >= self.context and context not in compared.flagged
        }
        if any(ratio <= 1 for ratio in known.values()):
            return False
        unknown = any(context >= self.context for context in compared.missing | compared.flagged)
        return True if known and not unknown else None


@dataclass(frozen=True)
class CrossoverBy(Goal):
    """Faster from a context on that is at most `context` tokens."""

    context: int

    @property
    def text(self) -> str:
        """The aim in words."""
        return f"a crossover at {self.context} or below"

    def met(self, compared: Compared) -> bool | None:
        """Say nothing where only a line beyond what was measured leads to the aim or past it.

        One context at the aim or beyond that is behind misses it, whatever others are not known.
        """
        if any(
            ratio < 1
            for context, ratio in compared.speedups.items()
            if context >= self.context and context not in compared.flagged
        ):
            return False
        if compared.flagged:
            return None
        kind, crossing = compared.crossover.kind, compared.crossover.context
        if kind not in _AHEAD or crossing is None:
            return None
        if crossing > self.context:
            # Ahead at the shortest context already: the crossing may lie anywhere below it.
            return None if kind is CrossoverKind.BELOW else False
        # A context beyond the crossing that is missing may be one where the other is ahead again.
        return None if any(context > crossing for context in compared.missing) else True


def goal_of(peer: str) -> Goal:
    """Return the aim beside a peer: transformers runs the same loop, the others their own."""
    return AheadFrom(4096) if peer.startswith("transformers") else CrossoverBy(16384)
