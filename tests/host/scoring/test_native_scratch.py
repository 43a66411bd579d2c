# SPDX-License-Identifier: Apache-2.0
"""What the native scorer says it takes in memory against the arrays that it makes."""

import tracemalloc
from functools import cache

import pytest
from scorer_cases import plain_keys, plain_query, segments_of
from test_native_scorer import streamed

from hillinfer.scoring.layout import score_bytes_per_token, scratch_bytes
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import Wanted
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

CASES = [
    (KernelSpec(64, 3, 3), 40_000),
    (KernelSpec(128, 8, 4, KeyMode.INT2), 20_000),
    (KernelSpec(64, 1, 64, KeyMode.INT8), 9_000),
    (KernelSpec(64, 2, 2, KeyMode.INT4, Rule.RAW_SUM), 30_000),
]


@cache
def streamed_segments(case):
    """Shadows of a case; they know no scope."""
    spec, tokens = CASES[case]
    scorer = NativeScorer(spec, Scope.LAYER)
    keys = plain_keys(1, tokens, spec.kv_heads, spec.head_dim)
    return streamed(segments_of(scorer, keys))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_arrays_stay_within_the_bound(case, scope):
    """Of shadows on the drive, where L' of all tokens is kept; C++ works in the rest of it."""
    spec, tokens = CASES[case]
    scorer = NativeScorer(spec, scope)
    query, given = plain_query(1, spec), streamed_segments(case)
    tracemalloc.start()
    try:
        scorer.choose(query, 0.125, given, 0, [Wanted(tokens, 4, 32)])[0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    growing = tokens * score_bytes_per_token(spec, scope)
    assert peak <= scratch_bytes(spec) + growing
    # A figure to plan with, so not many times what is used either.
    assert peak >= growing / 4
