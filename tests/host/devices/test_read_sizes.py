# SPDX-License-Identifier: Apache-2.0
"""The size of P2P reads follows from the rates that were measured."""

import pytest

from hillinfer.devices.xrt.device import BLOCKS, ReadSizes

LOAD = 8 << 20


def measured(seconds, load=LOAD):
    """Let loads take some seconds by block size until a size is chosen."""
    curve = ReadSizes(load)
    tried = []
    for _ in range(40):
        block = curve.block_bytes()
        tried.append(block)
        curve.note(block, seconds(block, len(tried)))
    return curve, tried


def test_every_size_is_tried_and_the_fastest_chosen():
    curve, tried = measured(lambda block, _: {256 << 10: 1.0}.get(block, 2.0))
    assert set(tried[: 3 * len(BLOCKS)]) == set(BLOCKS)
    assert set(tried[3 * len(BLOCKS) :]) == {256 << 10}
    assert curve.rates[256 << 10] == LOAD


def test_the_smallest_of_those_that_are_fast_enough_is_chosen():
    _, tried = measured(
        lambda block, _: 1.04 if block == 1 << 20 else (1 if block > 1 << 20 else 3)
    )
    assert tried[-1] == 1 << 20
    _, tried = measured(lambda block, _: 1.1 if block == 1 << 20 else (1 if block > 1 << 20 else 3))
    assert tried[-1] == 4 << 20


def test_one_slow_load_decides_nothing():
    _, tried = measured(lambda block, number: 9.0 if number == 2 else 1.0 / block)
    assert tried[-1] == 4 << 20


@pytest.mark.parametrize("load", [4096, 64 << 10, 100_000, 3 << 20, 4 << 20])
def test_no_block_is_larger_than_a_load(load):
    _, tried = measured(lambda block, _: 1.0 / block, load)
    assert max(tried) == tried[-1] == load
