# SPDX-License-Identifier: Apache-2.0
"""Rates of a plain drive, measured once per machine."""

from __future__ import annotations

from pathlib import Path

import torch

from hillinfer.app.kept_rates import KeptRates
from hillinfer.app.plain_profiling import PlainProfiling
from hillinfer.app.rates import Rates
from hillinfer.app.rates_key import RatesKey
from hillinfer.devices.scorer import Scorer
from hillinfer.storage.read_engine import ReadEngine

DEVICE = "nvme"


def plain_rates(
    scorer: Scorer, row_bytes: int, cold_dir: Path, engine: ReadEngine, kept: KeptRates
) -> tuple[Rates, float]:
    """Return kept rates, or measure and keep them, and weights per second of a matrix product.

    Parameters
    ----------
    scorer
        Of device `nvme`.
    row_bytes
        Bytes of a row.
    cold_dir, engine
        The drive and what reads it.
    kept
        Where rates are kept; the product is measured each time.
    """
    key = RatesKey.of(
        scorer.spec,
        scorer.scope,
        row_bytes,
        cold_dir,
        engine.name,
        torch.get_num_threads(),
        DEVICE,
        None,
    )
    profiling = PlainProfiling(scorer, row_bytes, cold_dir, engine)
    return kept.get(key, profiling.rates), profiling.multiplying()
