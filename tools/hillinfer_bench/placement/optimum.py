# SPDX-License-Identifier: Apache-2.0
"""The best placement there is, by integer programming; for comparison only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csr_array

from hillinfer.placement.stock import Stock


@dataclass(frozen=True)
class Optimum:
    """The best placement of a stock's documents.

    Parameters
    ----------
    plan
        Number of the option of each document, by name.
    utility
        The sum of their utilities.
    resting
        The sum where all documents rest.
    """

    plan: dict[str, int]
    utility: float
    resting: float

    def share(self, utility: float) -> float:
        """Return how much of what can be gained over resting a placement has gained.

        Where nothing can be gained it is 1.
        """
        possible = self.utility - self.resting
        return (utility - self.resting) / possible if possible > 0 else 1.0


def optimum(
    stock: Stock, gap: float = 1e-6, allowed: Mapping[str, Sequence[int]] | None = None
) -> Optimum:
    """Return the best placement of a stock's documents within its budgets.

    A multiple-choice knapsack with a constraint for each tier, solved by scipy's HiGHS.

    Parameters
    ----------
    stock
        Its placement is left as it is.
    gap
        Relative distance from the optimum at which to stop.
    allowed
        Numbers of the options that may be chosen, by name; all where None.

    Raises
    ------
    ValueError
        Where pinned documents do not fit.
    """
    programme = _Programme.of(stock, allowed)
    found = programme.solved(np.ones(len(programme.choices)), {"mip_rel_gap": gap})
    plan = dict(programme.choices[column] for column in np.flatnonzero(found.x > 0.5))
    utility = sum(one.utility(plan[name]) for name, one in stock.contexts.items())
    return Optimum(plan, utility, programme.resting)


def share_at_least(stock: Stock) -> float:
    """Return a lower limit of `Optimum.share` of a stock's placement, in a quarter of the time.

    No placement gains more than one that may keep parts of a document in several forms. The stock's
    own gains as much as resting, or more.

    Raises
    ------
    ValueError
        Where pinned documents do not fit.
    """
    programme = _Programme.of(stock, None)
    found = programme.solved(np.zeros(len(programme.choices)), {})
    most = programme.resting - found.fun * programme.largest
    return Optimum({}, most, programme.resting).share(stock.utility())


@dataclass(frozen=True)
class _Programme:
    """The integer programme: a column for each option, a row for each document and tier."""

    choices: list[tuple[str, int]]
    gains: NDArray[np.float64]
    sizes: csr_array
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    resting: float

    @classmethod
    def of(cls, stock: Stock, allowed: Mapping[str, Sequence[int]] | None) -> _Programme:
        choices = [
            (name, number)
            for name, context in stock.contexts.items()
            for number in (allowed[name] if allowed else range(len(context.options)))
            if context.pinned in (None, number)
        ]
        names = {name: row for row, name in enumerate(stock.contexts)}
        tiers = {tier.name: row for row, tier in enumerate(stock.limited, start=len(names))}
        resting = {name: one.utility(stock.rest(name)) for name, one in stock.contexts.items()}
        gains = np.array(
            [stock.contexts[name].utility(number) - resting[name] for name, number in choices]
        )
        rows, columns, sizes = [], [], []
        for column, (name, number) in enumerate(choices):
            option = stock.contexts[name].options[number]
            rows.append(names[name])
            columns.append(column)
            sizes.append(1.0)
            if option.tier in tiers:
                rows.append(tiers[option.tier])
                columns.append(column)
                sizes.append(float(option.byte_count))
        matrix = coo_array(
            (np.array(sizes), (np.array(rows), np.array(columns))),
            shape=(len(names) + len(tiers), len(choices)),
        )
        budgets = [float(tier.budget or 0) for tier in stock.limited]
        lower = np.array([1.0] * len(names) + [0.0] * len(tiers))
        upper = np.array([1.0] * len(names) + budgets)
        # Sizes and gains near 1: the solver's tolerances are absolute.
        scale = np.array([1.0] * len(names) + [max(budget, 1.0) for budget in budgets])
        scaled = matrix.multiply(1 / scale[:, None]).tocsr()
        return cls(choices, gains, scaled, lower / scale, upper / scale, sum(resting.values()))

    @property
    def largest(self) -> float:
        """The largest gain, in which `solved` counts."""
        return float(np.abs(self.gains).max(initial=0.0)) or 1.0

    def solved(self, integrality: NDArray[np.float64], options: dict[str, float]) -> OptimizeResult:
        found = milp(
            -self.gains / self.largest,
            integrality=integrality,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(self.sizes, self.lower, self.upper),
            options=options,
        )
        if found.x is None:
            raise ValueError(f"no placement keeps every budget: {found.message}")
        return found
