# SPDX-License-Identifier: Apache-2.0
"""Decode steps over exact rows and coded tokens: the golden model's bits, wherever codes lie."""

import numpy as np
import pytest
from coded_golden import SETTINGS, SHAPE, Text
from placement_matrix import Budget, pairs

LONG = Text(prompt=1090, steps=6)


@pytest.fixture(scope="module")
def expected():
    return LONG.golden(SETTINGS)


def run(way, text, settings, cold_dir, announced=False):
    with_runtime = way.open(SHAPE, settings, cold_dir, text.prompt + text.steps)
    try:
        sequences = [with_runtime.open_sequence() for _ in range(way.batch)]
        for one in sequences:
            text.read(with_runtime, one)
        found = []
        for step in range(text.steps):
            for one in sequences:
                found.append(text.decode(with_runtime, one, step, announced))
        statistics = with_runtime.statistics()
        assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
        return np.stack(found[:: way.batch]), statistics
    finally:
        with_runtime.close()


@pytest.mark.parametrize("way", pairs(), ids=str)
def test_every_placement_gives_the_golden_models_bits(way, expected, cold_dir):
    found, statistics = run(way, LONG, SETTINGS, cold_dir)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))
    assert 0 < statistics.coded_tokens < statistics.selected_tokens
    if way.budget is Budget.LEAST:
        assert statistics.coded_arrivals > 0


def test_twins_differ(expected):
    """One flipped code, and one token exact instead of coded, are seen."""
    for changed in ({"promoted": 1},):
        other = LONG.golden(SETTINGS, **changed)
        assert not np.array_equal(other.view(np.int32), expected.view(np.int32))
