# SPDX-License-Identifier: Apache-2.0
"""Budgets for tests of generation."""

import pytest
from generation_runs import SETTINGS

from hillinfer.model_shape import ModelShape
from hillinfer.pools.budget_plan import BudgetPlan
from hillinfer.settings import Settings


@pytest.fixture(scope="session")
def least_budget():
    """Return a function that gives the least bytes a tiny model can run a context with."""

    def least(tiny, tokens, sequences=1, **changes):
        shape = ModelShape.from_config(tiny.config(), tiny.dtype)
        settings = Settings().changed(**(SETTINGS | changes))
        return BudgetPlan.with_whole_shadow(shape, settings, tokens, sequences).required_bytes

    return least
