# SPDX-License-Identifier: Apache-2.0
"""Kernels of the cocotb bench, each with a launch: shapes whose simulators build in seconds."""

from dataclasses import dataclass
from typing import Any

from launch_cases import random_launch, random_shadow_launch
from rtl_kernels import SMALL

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle
from hillinfer_model.presets import preset_spec


@dataclass(frozen=True)
class CocotbKernel:
    """A kernel and what it is given; `scope` is None for make_shadow."""

    name: str
    spec: KernelSpec
    scope: Scope | None
    launch: Any


def _spec(mode, rule, style=ProductStyle.DSP):
    return KernelSpec(
        *(64, 2, 2), key_mode=mode, rule=rule, segment_tokens=512, block_tokens=64,
        product_style=style,
    )  # fmt: skip


_INT4 = _spec(KeyMode.INT4, Rule.WEIGHT_SUM, ProductStyle.LUT)
_FP16 = _spec(KeyMode.FP16, Rule.RAW_SUM)
# Segments that end in mid-tile, one without tokens, more than one block; rows of keys and values.
COCOTB_KERNELS = {
    "int8-raw_sum": CocotbKernel(
        "score_tokens", SMALL, Scope.KV_HEAD, random_launch(SMALL, Scope.KV_HEAD, [70, 0, 33])
    ),
    "int4-weight_sum": CocotbKernel(
        "score_tokens", _INT4, Scope.LAYER, random_launch(_INT4, Scope.LAYER, [133, 0, 70])
    ),
    "fp16-raw_sum": CocotbKernel(
        *("score_tokens", _FP16, Scope.LAYER),
        random_launch(_FP16, Scope.LAYER, [70, 0, 21], extra_beats=4),
    ),
    "make_shadow-int4": CocotbKernel(
        "make_shadow", _INT4, None, random_shadow_launch(_INT4, [70, 0, 21], extra_beats=4)
    ),
}


def preset_kernel(name, preset, mode, rule):
    """A named model's kernel with a launch that simulates in seconds."""
    spec = preset_spec(preset, mode, rule)
    if name == "make_shadow":
        return CocotbKernel(name, spec, None, random_shadow_launch(spec, [70, 0, 21]))
    launch = random_launch(spec, Scope.LAYER, [70, 0, 21])
    return CocotbKernel(name, spec, Scope.LAYER, launch)
