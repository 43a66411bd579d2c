# SPDX-License-Identifier: Apache-2.0
"""Coded tokens that a lane brings beside the model: the golden model's bits, however late they are.

The lanes are threads of the host, so all of this runs without a GPU; see `copy_lanes.py`.
"""

import numpy as np
import pytest
from coded_golden import SETTINGS, Text
from copy_lanes import ForgottenRowsLane, HostLane, LateLane, UnwaitedLane
from placement_matrix import Budget, Path, Way

# The second segment has statistics of its own.
TEXT = Text(prompt=1700, steps=3)
SHORT = Text(prompt=300, steps=3, seed=5)


def run(way, text, settings, cold_dir, lane, announced=False):
    runtime = way.open(text.shape, settings, cold_dir, text.prompt + text.steps, lane=lane)
    try:
        sequence = runtime.open_sequence()
        text.read(runtime, sequence)
        found = [text.decode(runtime, sequence, step, announced) for step in range(text.steps)]
        return np.stack(found), runtime.statistics()
    finally:
        runtime.close()


def same(found, expected):
    return np.array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.fixture(scope="module")
def expected():
    return {text.prompt: text.golden(SETTINGS) for text in (TEXT, SHORT)}


WAYS = [
    Way(),
    Way(Budget.SOME_HOT, path=Path.COLD),
    Way(Budget.LEAST, "core", path=Path.COLD),
    Way(Budget.LEAST, path=Path.STREAMED),
]
LANES = {
    "at once": HostLane,
    "late there": lambda: LateLane(to_gpu=(0.003,)),
    "late back": lambda: LateLane(from_gpu=(0.003,)),
}
BEHIND = {"now and then": lambda: LateLane(to_gpu=(0.0, 0.0, 0.004), from_gpu=(0.002, 0.0))}


# How late copies are has nothing to do with where segments end.
BOTH = [(TEXT, way, "now and then") for way in WAYS] + [(SHORT, WAYS[1], lane) for lane in LANES]


@pytest.mark.parametrize(
    ("text", "way", "lane"), BOTH, ids=lambda one: one.prompt if isinstance(one, Text) else str(one)
)
def test_lanes_give_the_golden_models_bits(text, way, lane, expected, cold_dir):
    found, statistics = run(way, text, SETTINGS, cold_dir, (LANES | BEHIND)[lane]())
    assert same(found, expected[text.prompt])
    assert 0 < statistics.coded_tokens < statistics.selected_tokens
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes


def test_a_coded_token_takes_a_part_of_the_bytes_of_its_row(cold_dir):
    _, exact = run(Way(), SHORT, SETTINGS.changed(exact=1), cold_dir, HostLane())
    _, coded = run(Way(), SHORT, SETTINGS, cold_dir, HostLane())
    assert coded.selected_tokens == exact.selected_tokens
    row = SHORT.shape.row_bytes
    saved = exact.host_to_device_bytes - coded.host_to_device_bytes
    assert saved == coded.coded_tokens * (row - 66 - 18)


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": "kv_head"},
        {"rule": "raw_sum"},
        {"exact": 0.0, "exact_floor": 0},
        {"alpha": 1.0, "exact": 0.1, "exact_floor": 0},
    ],
    ids=str,
)
def test_every_kind_of_selection(changes, cold_dir):
    settings = SETTINGS.changed(**changes)
    found, statistics = run(Way(), SHORT, settings, cold_dir, HostLane())
    assert same(found, SHORT.golden(settings))
    assert statistics.coded_tokens > 0


def test_queries_that_were_announced_give_the_bits_of_the_processor(cold_dir):
    way = Way(Budget.LEAST, path=Path.PREFETCHED)
    there, counted = run(way, SHORT, SETTINGS, cold_dir, LateLane((0.002,)), announced=True)
    here, also = run(way, SHORT, SETTINGS, cold_dir, None, announced=True)
    assert same(there, here)
    assert counted.coded_tokens == also.coded_tokens > 0


@pytest.mark.parametrize(
    "lane",
    [
        lambda: UnwaitedLane(to_gpu=(0.02,)),
        lambda: ForgottenRowsLane(from_gpu=(0.02,)),
    ],
    ids=["nobody waits", "new rows are taken for arrived"],
)
def test_lanes_with_a_mistake_are_found_out(lane, expected, cold_dir):
    found, _ = run(Way(), SHORT, SETTINGS, cold_dir, lane())
    assert not same(found, expected[SHORT.prompt])
