# SPDX-License-Identifier: Apache-2.0
"""Everything that can run a launch, in one table: a new execution is one line.

An execution has a name, `score(spec, launch)` and `make_shadow(spec, launch)`, which return a
`LaunchResult`. Its maker is called once per test process and may skip the test, saying which tool
is missing and how to install it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from launch_cases import usual_tokens
from launch_oracle import OracleExecution

from hillinfer_hw.rtl import RtlExecution
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.verilate import verilator_bin
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.presets import PRESETS, preset_spec


class GoldenExecution:
    """The golden model behind the launch format."""

    name = "golden"

    def score(self, spec, launch):
        return run_score_launch(spec, launch)

    def make_shadow(self, spec, launch):
        return run_shadow_launch(spec, launch)


# Shapes that keep the exact fractions short: several heads, a row that ends in mid-beat, and one
# whose channels are padded.
SMALL_SHAPES = {"two-heads": (64, 2, 2), "half-beat": (80, 1, 2), "padded": (50, 1, 3)}


def small_spec(name, key_mode, rule):
    shape = SMALL_SHAPES[name]
    return KernelSpec(*shape, key_mode=key_mode, rule=rule, segment_tokens=512)


def csim(scheduling):
    """The compiled HLS C++; skips where a tool is missing."""

    def make():
        csim = pytest.importorskip("hillinfer_hw.csim", reason="rendering needs jinja2")
        from hillinfer_hw.csim_build import Scheduling
        from hillinfer_hw.toolchain import MissingToolError, find_ap_types, find_compiler

        try:
            find_compiler()
            find_ap_types()
        except MissingToolError as missing:
            pytest.skip(str(missing))
        return csim.CsimExecution(Scheduling(scheduling))

    return make


def small_rtl_spec(name, key_mode, rule):
    """As `small_spec`; channels are padded by whoever lays out memory, not by the kernel."""
    return replace(preset_like(small_spec(name, key_mode, rule)), block_tokens=64)


def preset_like(spec):
    """The spec with heads as wide as in memory and the product style of its presets."""
    style = preset_spec("gemma-2b", spec.key_mode, spec.rule).product_style
    return replace(spec, head_dim=spec.padded_head_dim, product_style=style)


def rtl_execution():
    try:
        verilator_bin()
    except MissingToolError as missing:
        pytest.skip(str(missing))
    return RtlExecution()


def pynq_execution():
    from hillinfer_hw.emulation import Engine
    from hillinfer_hw.pynq_emulation import emulated_pynq

    try:
        verilator_bin()
        return emulated_pynq(Engine.RTL)
    except MissingToolError as missing:
        # All of it can be installed, and the project's CI does so.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))


# One, three, seven and eight query heads per KV head; rows that end in mid-beat; the widest head.
UNLIKE_PRESETS = ("smollm2-135m", "qwen2.5-0.5b", "opt-2.7b", "gemma-2b")


def every_rule(shape, mode):
    """Both rules for each shape and key mode."""
    return list(Rule)


def one_rule(shape, mode):
    """A rule per preset and key mode, so that every preset and every mode meets both."""
    turn = list(PRESETS).index(shape) + list(KeyMode).index(mode)
    return [list(Rule)[turn % 2]]


@dataclass(frozen=True)
class Entry:
    """One execution.

    `shapes` are those of its pairwise selection; `spec_of` makes the spec of a shape, key mode and
    rule. `rules` says which rules meet a shape and key mode: where each of them is a build of its
    own, one, in turn. `tokens` are those of a case's larger segments. `reference` makes what the
    execution must equal. `presets` are the shapes that whole sequences of keys are scored with.
    """

    name: str
    make: Callable[[], object]
    shapes: tuple[str, ...] = tuple(PRESETS)
    spec_of: Callable = preset_spec
    rules: Callable = every_rule
    tokens: Callable = usual_tokens
    reference: Callable[[], object] = GoldenExecution
    presets: tuple[str, ...] = ("smollm2-135m", "gemma-2b")


EXECUTIONS = [
    # Golden defines what is right, so it is held against the exact fractions.
    Entry(
        "golden",
        GoldenExecution,
        tuple(SMALL_SHAPES),
        small_spec,
        tokens=lambda spec: 75,
        reference=OracleExecution,
    ),
    # Compiling takes most of the time; `make csim` runs every case of every preset.
    Entry("csim", csim("sequential"), UNLIKE_PRESETS, rules=one_rule, presets=("smollm2-135m",)),
    Entry("csim-threads", csim("threads"), ("half-beat",), small_spec, presets=("half-beat",)),
    # A build takes up to a minute, so one shape here; `make cocotb` runs all presets.
    Entry("rtl", rtl_execution, ("half-beat",), small_rtl_spec, presets=("half-beat",)),
    # The same builds on an emulated card.
    Entry("pynq", pynq_execution, ("half-beat",), small_rtl_spec, presets=()),
]


@cache
def execution_of(name):
    """Make an execution once per process."""
    return next(entry for entry in EXECUTIONS if entry.name == name).make()
