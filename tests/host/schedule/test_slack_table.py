# SPDX-License-Identifier: Apache-2.0
"""Compute windows: exact on what attention costs, corrected by what passes took."""

import json

import numpy as np
import pytest

from hillinfer.schedule.windows import SlackTable


def cost(new, before):
    """a·m + b·m·P, in seconds."""
    return 1e-5 * new + 2e-9 * new * before


@pytest.mark.parametrize("new", [1, 2, 40, 64, 1000, 1024, 3000])
@pytest.mark.parametrize("before", [0, 7, 1024, 8064, 65536, 200_000])
def test_between_and_beyond_points_it_is_bilinear(new, before):
    assert SlackTable.measured(cost).window(new, before) == pytest.approx(cost(new, before))


def test_nothing_is_known_where_nobody_was():
    table = SlackTable()
    assert table.window(64, 8064) is None
    table.observe(64, 8064, 0.02)
    assert table.window(64, 8064) == pytest.approx(0.02)
    assert table.window(1024, 60_000) is None


def test_what_passes_take_corrects_it_without_forgetting_at_once():
    table = SlackTable.measured(cost)
    table.observe(64, 8064, 2 * cost(64, 8064))
    first = table.window(64, 8064)
    assert cost(64, 8064) < first < 2 * cost(64, 8064)
    for _ in range(40):
        table.observe(64, 8064, 2 * cost(64, 8064))
    assert table.window(64, 8064) == pytest.approx(2 * cost(64, 8064), rel=1e-3)
    # Far away nothing was learned.
    assert table.window(1, 0) == cost(1, 0)


def test_a_file_keeps_it():
    table = SlackTable()
    table.observe(16, 2000, 0.003)
    again = SlackTable.from_json(json.loads(json.dumps(table.as_json())))
    assert np.array_equal(again.seconds, table.seconds, equal_nan=True)
    # The twin.
    table.observe(16, 2000, 0.004)
    assert not np.array_equal(again.seconds, table.seconds, equal_nan=True)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"new_tokens": [1, 2], "prefix_tokens": [0, 1], "seconds": [[1, 2], [3, -4]]},
        {"new_tokens": [1, 2], "prefix_tokens": [0, 1], "seconds": [[1, 2]]},
        {"new_tokens": [2, 1], "prefix_tokens": [0, 1], "seconds": [[1, 2], [3, 4]]},
        {"new_tokens": [1], "prefix_tokens": [0, 1], "seconds": [[1, 2]]},
        {"new_tokens": [1, 2], "prefix_tokens": [0, 1], "seconds": [[1, "x"], [3, 4]]},
        {"new_tokens": [1, 2], "prefix_tokens": [0, 1], "seconds": [[1, 1e999], [3, 4]]},
    ],
)
def test_what_is_no_table_is_refused(record):
    with pytest.raises((ValueError, KeyError, TypeError)):
        SlackTable.from_json(record)
