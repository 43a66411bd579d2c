# SPDX-License-Identifier: Apache-2.0
"""A budget that is a share of the KV cache, and what breaks off while it is raised."""

import pytest
from runtime_rows import SETTINGS, SHAPE

from hillinfer.engine.budget_growth import BudgetGrowth, FollowingBudget
from hillinfer.memory_budget import Accountant

SHARE = SETTINGS.changed(dram_budget="50%", shadow="int4")


def test_a_budget_that_was_not_raised_is_raised_by_the_next_token():
    growth = BudgetGrowth(SHAPE, SHARE, planned_tokens=1024, most_bytes=1 << 30)
    limits, failures = [], [KeyboardInterrupt]

    def raise_limit(limit):
        if failures:
            raise failures.pop()
        limits.append(limit)

    first, _ = growth.at(1024)
    accountant = Accountant(first)
    following = FollowingBudget(growth, accountant, raise_limit)
    with pytest.raises(KeyboardInterrupt):
        following.cover(50_000)
    following.cover(50_000)
    assert limits == [growth.at(50_176)[1]]
    assert accountant.budget_bytes == growth.at(50_176)[0] > first
    assert following.covered == 50_176
    # The twin: for as many tokens nothing is raised again.
    following.cover(50_176)
    assert len(limits) == 1
