# SPDX-License-Identifier: Apache-2.0
"""One operation, many executions: what is chosen for a query is the same in each."""

from itertools import product

import numpy as np
import pytest
from native_variants import VARIANTS, native_scorer
from pairwise import pairwise
from scorer_cases import plain_keys, plain_query, segments_of
from twins.torch_scorer import TorchScorer

from hillinfer.devices.device import ResidentShadow
from hillinfer.devices.device_scorer import DeviceScorer
from hillinfer.devices.device_shadows import DeviceShadows
from hillinfer.devices.opening import CoreDevice, GoldenScorer
from hillinfer.errors import warn_of_loss
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted, total_tokens
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

SCALING = 0.1
# Tokens, and what is wanted of them and one that may come.
CASES = {
    "one token": (1, Wanted(1, 0, 1)),
    "all": (300, Wanted(300, 4, 8)),
    "only what is kept": (300, Wanted(12, 4, 8)),
    "some": (1500, Wanted(150, 4, 32)),
    "no sinks": (1024, Wanted(7, 0, 1)),
}


def spec_of(rule, mode):
    return KernelSpec(24, 2, 3, mode, rule=rule, segment_tokens=512)


def on_a_core(spec, scope, segments):
    """A scorer beside a device, which has the full groups of all segments but the second."""
    shadows = DeviceShadows(spec, CoreDevice(spec), 0.0, warn_of_loss)
    given = []
    for number, one in enumerate(segments):
        if number == 1 or one.tokens < 64:
            given.append(one)
            continue
        held = shadows.take(number)
        shadows.update(held, one.shadow, one.tokens)
        given.append(
            ResidentShadow(
                one.base_position, one.tokens, one.statistics, held.slot, held.tokens,
                held.probes, one.shadow, lambda one=one: one.shadow,
            )
        )  # fmt: skip
    return DeviceScorer(NativeScorer(spec, scope), shadows), given


def chosen(scorer, segments, query, coming, wanted):
    return scorer.choose(query, SCALING, segments, coming, [wanted])[0]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.int64
        np.testing.assert_array_equal(one, other)


# What is added up to scores by its kind: they meet in one function.
SCORES = list(product(Rule, Scope, (0, 1)))
MODES = [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2]


@pytest.mark.parametrize(
    ("case", "scores", "variant", "mode"), pairwise([list(CASES), SCORES, list(VARIANTS), MODES])
)
def test_every_execution_chooses_the_same(case, scores, variant, mode):
    (tokens, wanted), (rule, scope, coming) = CASES[case], scores
    keys, spec = plain_keys(tokens, tokens, 2, 24), spec_of(rule, mode)
    native = native_scorer(variant, spec, scope)
    segments, query = segments_of(native, keys), plain_query(3, spec)
    length = total_tokens(segments) + coming
    wanted = Wanted(min(wanted.count, length), wanted.sinks, wanted.recent)
    expected = chosen(GoldenScorer(spec, scope), segments, query, coming, wanted)
    for own in expected:
        assert len(own) == wanted.count
        assert coming == 0 or own[-1] == length - 1
    beside, given = on_a_core(spec, scope, segments)
    for scorer, own in (
        (native, segments),
        (TorchScorer(spec, scope), segments),
        (beside, given),
    ):
        assert_same(chosen(scorer, own, query, coming, wanted), expected)
    beside.shadows.close()


@pytest.mark.parametrize("scope", Scope)
def test_another_query_chooses_otherwise(scope):
    """The twin: what is compared above depends on what is scored."""
    spec = spec_of(Rule.WEIGHT_SUM, KeyMode.INT4)
    segments = segments_of(NativeScorer(spec, scope), plain_keys(1, 1500, 2, 24))
    beside, given = on_a_core(spec, scope, segments)
    for scorer, own in (
        (GoldenScorer(spec, scope), segments),
        (NativeScorer(spec, scope), segments),
        (TorchScorer(spec, scope), segments),
        (beside, given),
    ):
        one, other = (
            chosen(scorer, own, plain_query(seed, spec), 0, Wanted(150, 4, 32)) for seed in (3, 4)
        )
        assert not all(map(np.array_equal, one, other))
    beside.shadows.close()


@pytest.mark.parametrize(
    ("wanted", "coming"),
    [(Wanted(301, 0, 1), 0), (Wanted(3, 2, 2), 0), (Wanted(9, -1, 2), 0), (Wanted(9, 2, 0), 1)],
)
@pytest.mark.parametrize("scorer", [GoldenScorer, NativeScorer, TorchScorer])
def test_what_cannot_be_had_is_refused(scorer, wanted, coming):
    spec = spec_of(Rule.WEIGHT_SUM, KeyMode.INT4)
    segments = segments_of(NativeScorer(spec, Scope.LAYER), plain_keys(1, 300, 2, 24))
    with pytest.raises(ValueError, match=r"outside|below"):
        chosen(scorer(spec, Scope.LAYER), segments, plain_query(1, spec), coming, wanted)
