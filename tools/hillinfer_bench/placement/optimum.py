# SPDX-License-Identifier: Apache-2.0
"""The best placement there is, by integer programming; for comparison only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

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
    choices = [
        (name, number)
        for name, context in stock.contexts.items()
        for number in (allowed[name] if allowed else range(len(context.options)))
        if context.pinned in (None, number)
    ]
    names = {name: row for row, name in enumerate(stock.contexts)}
    tiers = {tier.name: row for row, tier in enumerate(stock.limited, start=len(names))}
    gains = np.array(
        [
            stock.contexts[name].utility(number) - stock.contexts[name].utility(stock.rest(name))
            for name, number in choices
        ]
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
    largest = float(np.abs(gains).max(initial=0.0)) or 1.0
    found = milp(
        -gains / largest,
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(scaled, lower / scale, upper / scale),
        options={"mip_rel_gap": gap},
    )
    if found.x is None:
        raise ValueError(f"no placement keeps every budget: {found.message}")
    plan = {choices[column][0]: choices[column][1] for column in np.flatnonzero(found.x > 0.5)}
    utility = sum(one.utility(plan[name]) for name, one in stock.contexts.items())
    resting = sum(one.utility(stock.rest(name)) for name, one in stock.contexts.items())
    return Optimum(plan, utility, resting)
