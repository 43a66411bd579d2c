# SPDX-License-Identifier: Apache-2.0
"""One formal bench and its mutants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One line of one source changed, and the property that is meant to see it.

    Parameters
    ----------
    file, old, new
        What is replaced, once.
    caught_by
        Label of the only assertion that is left in when the mutant is checked.
    """

    file: str
    old: str
    new: str
    caught_by: str


@dataclass(frozen=True)
class FormalBench:
    """A proof over every input sequence: bounded, by induction, or both.

    Parameters
    ----------
    name, top
        Of the row; of the top module: a bench, or the unit itself.
    parameters
        Of the top module.
    depth
        Cycles from reset of the bounded proof.
    mutants
        By name.
    inside
        File of properties that goes into the unit, where it sees registers; empty for a bench.
    induction
        Steps of the induction; 0 where the proof is only bounded.
    """

    name: str
    top: str
    parameters: Mapping[str, int]
    depth: int
    mutants: Mapping[str, Mutant] = field(default_factory=dict)
    inside: str = ""
    induction: int = 0

    @property
    def properties(self) -> str:
        """File that holds its properties."""
        return self.inside or f"{self.top}.sv"
