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
    "config": 70,
    "safetensors": 70,
    "gguf": 45,
    "template": 60,
    "tokenizer": 60,
    "session": 75,
    "xclbin": 1_000,
    "timeline": 20,
    "trace": 150,
    "rates": 150,
}
