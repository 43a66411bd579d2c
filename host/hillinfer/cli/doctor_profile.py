# SPDX-License-Identifier: Apache-2.0
"""What `hillinfer doctor --profile` measures and says."""

from __future__ import annotations

from pathlib import Path

import torch

from hillinfer.app.kept_rates import KeptRates
from hillinfer.app.plain_rates import DEVICE, plain_rates
from hillinfer.app.plain_step import PlainStep
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.devices.table import make_scorer
from hillinfer.errors import SettingsError
from hillinfer.machine.finding import Finding
from hillinfer.machine.model_shapes import SHAPES
from hillinfer.pools.budget_plan import kernel_spec
from hillinfer.settings import Settings
from hillinfer.storage.drive_calls import DriveCalls
from hillinfer.storage.read_engines import open_engine


def profile_findings(
    name: str, tokens: int, dram_budget: str, cold_dir: Path | None
) -> tuple[Finding, ...]:
    """Measure and keep the rates of a plain drive, and say what a decode step takes.

    Parameters
    ----------
    name
        Of a model's shape.
    tokens
        Of context.
    dram_budget, cold_dir
        As in the settings.

    Raises
    ------
    SettingsError
        Where a value is none.
    BudgetError
        Where the budget is too small for the context.
    """
    if name not in SHAPES:
        raise SettingsError(f"no shape is named '{name}'; there are {', '.join(SHAPES)}")
    if tokens < 1:
        raise SettingsError(f"--context {tokens} is no number of tokens: it must be 1 or more")
    model = SHAPES[name]
    settings = Settings().changed(dram_budget=dram_budget, cold_dir=cold_dir)
    shape = model.whole_kv_shape(2 * tokens, torch.float16)
    scorer = make_scorer(DEVICE, kernel_spec(shape, settings), settings.scope)
    engine = open_engine(settings.io, settings.io_threads, DriveCalls())
    try:
        rates, weights = plain_rates(
            scorer, shape.row_bytes, prepared_cold_dir(cold_dir), engine, KeptRates.of_user()
        )
    finally:
        engine.close()
    step = PlainStep(shape, settings, tokens, rates, model.layer_weights, weights)
    return tuple(step.findings(name))
