# SPDX-License-Identifier: Apache-2.0
"""Gives a device the share that its rates speak for."""

from __future__ import annotations

from pathlib import Path

import torch

from hillinfer.app.auto_beta import AutoBeta
from hillinfer.app.kept_rates import KeptRates
from hillinfer.app.latency_models import LATENCY_MODELS
from hillinfer.app.profiling import Profiling
from hillinfer.app.rates_key import RatesKey
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import Pace
from hillinfer.devices.errors import DeviceError
from hillinfer.model_shape import ModelShape
from hillinfer.settings import Settings
from hillinfer.storage.read_engine import ReadEngine
from hillinfer.storage.shadow_store import shadow_bytes


def share_by_rates(
    scorer: DeviceScorer,
    shape: ModelShape,
    settings: Settings,
    cold_dir: Path,
    engine: ReadEngine,
    shadow_limit_bytes: int,
) -> None:
    """Let an automatic β decide which segments a device gets (HillInfer section 4.3).

    Rates that are not kept yet are measured, which takes seconds and up to 300 MiB of memory,
    before a cache holds anything. Nothing is done where β is given, or the device is an emulation,
    whose rates say nothing: it is there to be tried and gets every full group.

    Parameters
    ----------
    scorer
        Of the device, which holds nothing yet.
    shape, settings
        Of the model and the cache.
    cold_dir, engine
        The drive and what reads it.
    shadow_limit_bytes
        Most bytes of full shadows in DRAM: what M0 has room for (equation 3).
    """
    shadows, spec = scorer.shadows, scorer.spec
    if settings.beta is not None or shadows.pace is Pace.EMULATED:
        return
    key = RatesKey.of(
        spec,
        scorer.scope,
        shape.row_bytes,
        cold_dir,
        engine.name,
        torch.get_num_threads(),
        settings.device,
        settings.xclbin,
    )
    profiling = Profiling(scorer, shape.row_bytes, cold_dir, engine)
    try:
        rates = KeptRates.of_user().get(key, profiling.rates)
    except DeviceError:
        # Told already; the host scores everything.
        return
    most = shadow_limit_bytes // (shape.layers * shadow_bytes(spec))
    model = LATENCY_MODELS[settings.beta_model](rates)
    shadows.share_by(AutoBeta(model, spec.segment_tokens, settings.alpha, most))
