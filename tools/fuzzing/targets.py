# SPDX-License-Identifier: Apache-2.0
"""The table of targets."""

from __future__ import annotations

from collections.abc import Sequence

from fuzzing.gguf_target import GGUFTarget
from fuzzing.model_targets import (
    ConfigTarget,
    SafetensorsTarget,
    TemplateTarget,
    TokenizerTarget,
)
from fuzzing.report_targets import RatesTarget, TimelineTarget, TraceTarget
from fuzzing.session_target import SessionTarget
from fuzzing.target import Target
from fuzzing.xclbin_target import XclbinTarget

TARGETS: Sequence[Target] = (
    ConfigTarget(),
    SafetensorsTarget(),
    GGUFTarget(),
    TemplateTarget(),
    TokenizerTarget(),
    SessionTarget(),
    XclbinTarget(),
    TimelineTarget(),
    TraceTarget(),
    RatesTarget(),
)
# Inputs of each that take about a minute together.
MINUTE = {
    "config": 140,
    "safetensors": 140,
    "gguf": 90,
    "template": 120,
    "tokenizer": 120,
    "session": 150,
    "xclbin": 2_000,
    "timeline": 30,
    "trace": 300,
    "rates": 300,
}
