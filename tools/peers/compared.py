# SPDX-License-Identifier: Apache-2.0
"""Two runtimes' steps side by side, as goals judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peers.crossover import Crossover


@dataclass(frozen=True)
class Compared:
    """What is known of two runtimes' steps.

    Parameters
    ----------
    speedups
        The peer's step over HillInfer's, by context in tokens; at least one.
    crossover
        From which context on HillInfer's step is the shorter one, of those contexts.
    missing
        Contexts that were asked for and that one of the two has no times of.
    flagged
        Contexts where the times of one of the two differ too much to mean much.
    """

    speedups: Mapping[int, float]
    crossover: Crossover
    missing: frozenset[int] = frozenset()
    flagged: frozenset[int] = frozenset()
