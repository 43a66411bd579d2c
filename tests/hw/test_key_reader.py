# SPDX-License-Identifier: Apache-2.0
"""The plain linear reader of keys, which one line puts in the place of manual bursts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from executions import csim, small_spec
from launch_cases import SCORE_CASES, SHADOW_CASES, random_launch
from launch_flips import visible_flip

from hillinfer_hw.hls_lint import lint
from hillinfer_hw.hls_loops import plain_headers
from hillinfer_hw.key_reader import KEY_READER, KeyReader, linear_loss
from hillinfer_hw.render import HARDWARE
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch
from hillinfer_model.presets import PRESETS, preset_spec

CASES = ("random", "odd_counts", "empty_segments", "layouts")
# Rows with gaps between them, cast in the kernel that scores: what either reader has most to do.
SPEC = small_spec("two-heads", KeyMode.FP16, Rule.RAW_SUM)


def linear():
    """The compiled C++ with the linear reader."""
    execution = csim("sequential")()
    from hillinfer_hw.csim_build import compile_sources, rendered_sources

    def build(kernel, spec, scheduling):
        return compile_sources(
            f"{kernel}.cpp", rendered_sources(kernel, spec, KeyReader.LINEAR), []
        )

    return replace(execution, build=build)


def same(one, other):
    return np.array_equal(one.output, other.output) and np.array_equal(one.status, other.status)


@pytest.mark.parametrize("case", CASES)
def test_it_gives_the_same_scores(case):
    launch = SCORE_CASES[case](SPEC, Scope.KV_HEAD, 75)
    assert same(linear().score(SPEC, launch), run_score_launch(SPEC, launch))


def test_a_flipped_bit_of_its_input_shows():
    launch = random_launch(SPEC, Scope.LAYER, [37, 5], extra_beats=1)
    flip = visible_flip(SPEC, launch, run_score_launch, same)
    assert not same(linear().score(SPEC, flip), run_score_launch(SPEC, launch))
    assert same(linear().score(SPEC, flip), run_score_launch(SPEC, flip))


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_it_gives_the_same_shadows(case):
    spec = small_spec("half-beat", KeyMode.INT4, Rule.WEIGHT_SUM)
    launch = SHADOW_CASES[case](spec, 75)
    assert same(linear().make_shadow(spec, launch), run_shadow_launch(spec, launch))


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_findings(preset):
    """Those of the reader that is chosen are in test_hls_lint.py."""
    from hillinfer_hw.csim_build import HLS, rendered_sources

    headers = plain_headers(HLS)
    (other,) = set(KeyReader) - {KEY_READER}
    for mode in KeyMode:
        spec = preset_spec(preset, mode, Rule.WEIGHT_SUM)
        tops = {"score_tokens"} | ({"make_shadow"} if mode is not KeyMode.FP16 else set())
        for kernel in tops:
            top = rendered_sources(kernel, spec, other)[f"{kernel}.cpp"]
            assert lint(top, headers) == []
            for reader in KeyReader:
                text = rendered_sources(kernel, spec, reader)[f"{kernel}.cpp"]
                assert ("burst_maxi" in text) is (reader is KeyReader.BURSTS)


def test_one_line_chooses():
    """The line is a default, so a render without a choice is the one that it names."""
    from hillinfer_hw.csim_build import rendered_sources

    chosen = {reader: rendered_sources("make_shadow", preset(), reader) for reader in KeyReader}
    assert rendered_sources("make_shadow", preset()) == chosen[KEY_READER]
    assert chosen[KeyReader.BURSTS] != chosen[KeyReader.LINEAR]
    text = (HARDWARE.parent / "tools" / "hillinfer_hw" / "key_reader.py").read_text()
    assert text.count("KEY_READER = ") == 1


@pytest.mark.parametrize(
    ("name", "mode", "most"),
    [
        ("llama-3.1-8b", KeyMode.INT8, 0.03),
        ("llama-3.1-8b", KeyMode.INT4, 0.03),
        ("smollm2-135m", KeyMode.INT8, 0.10),
        ("smollm2-135m", KeyMode.INT4, 0.10),
        # Half the beats a segment: more than the others lose.
        ("llama-3.1-8b", KeyMode.INT2, 0.04),
        ("smollm2-135m", KeyMode.INT2, 0.16),
    ],
)
def test_what_the_linear_reader_loses(name, mode, most):
    """150 cycles of latency, once a segment."""
    spec = preset_spec(name, mode, Rule.WEIGHT_SUM)
    assert most / 6 < linear_loss(spec) <= most
    assert linear_loss(spec) == 150 / (150 + spec.segment_beats)


preset = partial(preset_spec, "smollm2-135m", KeyMode.INT4, Rule.WEIGHT_SUM)
