# SPDX-License-Identifier: Apache-2.0
"""Exact and coded tokens ranked by a kernel's scores: the golden model's bits, as on any device."""

from dataclasses import replace

import numpy as np
import pytest
from coded_golden import SETTINGS, SHAPE, Text
from device_cases import Through, Wrapped
from executions import csim
from placement_matrix import Budget, Path, Way, pairs

from hillinfer.devices.opening import DEVICES

# As wide as a kernel is built for.
TEXT = Text(prompt=1090, steps=2, shape=replace(SHAPE, head_dim=64))


@pytest.fixture(scope="module")
def kernel():
    """Skip where what compiles kernels is missing."""
    csim("sequential")()


@pytest.fixture(scope="module")
def expected():
    return TEXT.golden(SETTINGS)


def run(way, settings, cold_dir, **given):
    tokens = TEXT.prompt + TEXT.steps
    runtime = way.open(TEXT.shape, settings, cold_dir, tokens, **given)
    try:
        sequences = [runtime.open_sequence() for _ in range(way.batch)]
        for one in sequences:
            TEXT.read(runtime, one)
        found = [
            [TEXT.decode(runtime, one, step) for step in range(TEXT.steps)] for one in sequences
        ]
        return np.array(found), runtime.statistics()
    finally:
        runtime.close()


def same(found, expected):
    return all(np.array_equal(one.view(np.int32), expected.view(np.int32)) for one in found)


@pytest.mark.parametrize("way", pairs(device=("csim",), policy=("lru", "decayed")), ids=str)
def test_a_kernels_ranks_split_as_the_golden_models(way, kernel, expected, cold_dir):
    found, statistics = run(way, SETTINGS, cold_dir)
    assert same(found, expected)
    assert statistics.device_scored_tokens > 0
    assert not statistics.device_lost
    assert 0 < statistics.coded_tokens < statistics.selected_tokens
    assert way.was_taken(statistics)


class Tilted(Through):
    """A device that gives some tokens of a segment the scores of others."""

    def score(self, *given):
        for one in self.device.score(*given):
            tuples = one.tuples.copy()
            tuples[:, 100:200] = tuples[:, 500:600]
            yield replace(one, tuples=tuples)


def test_other_scores_split_otherwise(kernel, expected, cold_dir):
    devices = {**DEVICES, "csim": Wrapped("csim", Tilted).open}
    found, _ = run(Way(Budget.ALL_HOT, "csim", path=Path.HOT), SETTINGS, cold_dir, devices=devices)
    assert not same(found, expected)
