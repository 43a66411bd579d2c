# SPDX-License-Identifier: Apache-2.0
"""What systems of a case are opened with, from the case and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hillinfer.machine.model_shapes import SHAPES
from hillinfer.machine.processor import ProcessorFacts
from hillinfer.model_shape import ModelShape
from hillinfer.models.number_type import NumberType
from hillinfer_bench.decode.case import Case
from hillinfer_bench.decode.setting import BenchSetting, budget_bytes


def table_type(number_type: NumberType) -> torch.dtype:
    """Return the type of models with random weights: that of bfloat16 weights."""
    return number_type.resolve(torch.bfloat16, "cpu", ProcessorFacts.read())


def case_setting(
    case: Case,
    model: Any,
    real_shape: ModelShape | None,
    positions: int,
    cold_dir: Path,
    trace: Path | None = None,
) -> BenchSetting:
    """Return what systems are opened with, but for selections.

    Parameters
    ----------
    case
        What is measured.
    model
        The model, or something that has its `dtype`.
    real_shape
        Of the real model; None for one of the table of shapes.
    positions
        Of the model.
    cold_dir
        Existing directory on the drive.
    trace
        File that HillInfer's own system writes its lanes to; None for none.
    """
    shape = real_shape or SHAPES[case.model].kv_shape(positions, model.dtype)
    all_layers = real_shape.layers if real_shape else SHAPES[case.model].all_layers
    return BenchSetting(
        case=case,
        model=model,
        shape=shape,
        budget_bytes=budget_bytes(case, shape, all_layers),
        cold_dir=cold_dir,
        selections=None,
        all_layers=all_layers,
        trace=trace,
    )
