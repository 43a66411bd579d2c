# SPDX-License-Identifier: Apache-2.0
"""Kernels whose processes write each stream in another stage of their pipelines.

Which stage is the synthesis tool's choice. So every written stream gets a delay of 0 to 32 rounds,
and pipelines stall as hardware's do: what is inside stays there while a write finds no room.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from executions import csim, small_spec
from launch_cases import SCORE_CASES, SHADOW_CASES, random_launch, random_shadow_launch

from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.golden_launch import run_score_launch, run_shadow_launch

SHALLOW = {"centred": 8}
LATE = {"exponents_to_round": 32, "centred": 0}
CASES = ("random", "odd_counts", "empty_segments", "layouts")


def spec_of(mode):
    """Heads of two and a half beats; as other tests have it, so that one build serves all."""
    return small_spec("half-beat", mode, Rule.WEIGHT_SUM)


def rows():
    for mode in KeyMode:
        spec = spec_of(mode)
        # One mode in every run, the others in those of the kernels.
        marks = [pytest.mark.xdist_group(spec.digest().hex())]
        if mode is not KeyMode.INT4:
            marks.append(pytest.mark.kernels)
        yield pytest.param(spec, id=str(mode), marks=marks)


def threads(**changes):
    return replace(csim("threads")(), **changes)


def assert_golden(execution, spec, launch, scope):
    run, golden = (
        (execution.make_shadow, run_shadow_launch)
        if scope is None
        else (execution.score, run_score_launch)
    )
    found, expected = run(spec, launch), golden(spec, launch)
    assert np.array_equal(found.output, expected.output)
    assert np.array_equal(found.status, expected.status)


def launches(spec, seed):
    """Launches of both kernels and scopes, a case of each."""
    case = CASES[seed % len(CASES)]
    scope = list(Scope)[seed % 2]
    yield scope, SCORE_CASES[case](spec, scope, 75)
    if spec.key_mode is not KeyMode.FP16:
        yield None, SHADOW_CASES[case](spec, 75)


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("spec", [*rows()])
def test_no_delay_of_a_stream_changes_a_bit_or_ends_in_a_deadlock(spec, seed):
    for scope, launch in launches(spec, seed):
        assert_golden(threads(seed=seed), spec, launch, scope)


def casting(spec):
    """The launch that casts rows, and its scope: of `make_shadow` where keys come as a shadow."""
    if spec.key_mode is KeyMode.FP16:
        return Scope.LAYER, random_launch(spec, Scope.LAYER, [70, 20])
    return None, random_shadow_launch(spec, [70, 20])


@pytest.mark.parametrize("spec", [*rows()])
def test_an_exponent_may_come_as_late_as_a_delay_can_be(spec):
    """The twin: room for 8 beats, which was enough without stages."""
    scope, launch = casting(spec)
    assert_golden(threads(skews=LATE), spec, launch, scope)
    assert_golden(threads(depths=SHALLOW), spec, launch, scope)
    with pytest.raises(RuntimeError, match=r"DEADLOCK.* centred is full \(8 of 8"):
        assert_golden(threads(depths=SHALLOW, skews=LATE), spec, launch, scope)


def test_some_seed_finds_a_stream_that_is_too_shallow():
    spec = spec_of(KeyMode.INT4)
    scope, launch = casting(spec)

    def deadlocks(seed):
        try:
            assert_golden(threads(depths=SHALLOW, seed=seed), spec, launch, scope)
        except RuntimeError as error:
            return "DEADLOCK" in str(error)
        return False

    assert any(deadlocks(seed) for seed in range(1, 9))


def test_a_distance_that_is_not_kept_is_told():
    """What is said of a memory of two halves is checked at every read: a larger distance shows."""
    execution = threads()
    from hillinfer_hw.csim_build import HLS, compile_threads, rendered_sources

    spec = spec_of(KeyMode.INT4)
    launch = random_launch(spec, Scope.LAYER, [20, 1, 3])
    assert_golden(execution, spec, launch, Scope.LAYER)

    def build_mutant(kernel, spec, scheduling):
        header = (HLS / "score.h").read_text(encoding="utf-8")
        further, count = re.subn(r"direction=RAW distance=2", "direction=RAW distance=999", header)
        assert count == 1
        return compile_threads(kernel, rendered_sources(kernel, spec) | {"score.h": further})

    with pytest.raises(
        RuntimeError, match="rounds after it was written, and its DEPENDENCE pragma says 999"
    ):
        assert_golden(replace(execution, build=build_mutant), spec, launch, Scope.LAYER)
