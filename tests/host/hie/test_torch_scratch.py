# SPDX-License-Identifier: Apache-2.0
"""What the torch scorer says it takes in memory against what it takes."""

import tracemalloc

import numpy as np
import pytest
import torch
from scorer_cases import plain_keys, plain_query, segments_of

from hillinfer.hie.scratch import score_bytes_per_token, scratch_bytes
from hillinfer.hie.torch_scorer import TorchScorer
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import KernelSpec

CASES = [
    (KernelSpec(64, 3, 3), 4000),
    (KernelSpec(128, 8, 4, KeyMode.INT2), 2000),
    (KernelSpec(64, 1, 64, KeyMode.INT8), 2000),
    (KernelSpec(16, 1, 1, KeyMode.INT4, segment_tokens=65_536), 50_000),
    (KernelSpec(64, 2, 2, KeyMode.INT4, Rule.RAW_SUM), 3000),
    (KernelSpec(80, 16, 16, KeyMode.FP16, segment_tokens=8192), 1500),
]


def peak_bytes(call):
    """The most that torch and numpy hold at once during a call, beyond what they held."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        # Inside, so that it does not trace what the profiler imports.
        tracemalloc.start()
        try:
            call()
            numpy_peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])])
    return numpy_peak + int(max(held, default=0))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_stays_within_its_bound(case, scope):
    spec, tokens = CASES[case]
    coder = TorchScorer(spec, scope)
    keys = plain_keys(1, tokens, spec.kv_heads, spec.head_dim)
    segments = segments_of(coder, keys)
    query = plain_query(1, spec)
    own = keys[: spec.segment_tokens]

    def score():
        for _ in TorchScorer(spec, scope).score(query, 0.125, segments):
            pass

    bound = scratch_bytes(spec)
    scored = peak_bytes(score)
    assert scored <= bound + tokens * score_bytes_per_token(spec)
    # The bound is a figure to plan with, so not many times what is used either.
    assert scored >= (bound + tokens * score_bytes_per_token(spec)) / 4
    assert peak_bytes(lambda: coder.statistics(own, 0, None)) <= bound
    shadow = segments[0].shadow.copy()
    assert peak_bytes(lambda: coder.encode(own, segments[0].statistics, shadow, 0)) <= bound


def test_the_measurement_sees_both_libraries():
    def allocate():
        torch.zeros(1_000_000, dtype=torch.uint8)
        held = torch.zeros(3_000_000, dtype=torch.uint8), np.zeros(2_000_000, dtype=np.uint8)
        del held

    assert 5_000_000 <= peak_bytes(allocate) < 5_500_000
