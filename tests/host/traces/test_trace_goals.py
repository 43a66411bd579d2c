# SPDX-License-Identifier: Apache-2.0
"""The default policy on a trace that comes along, at two capacities.

Replays are the same everywhere, so these are no measurements. All capacities: `make traces`.
"""

import pytest

from hillinfer_bench.traces.request_trace import RequestTrace
from hillinfer_bench.traces.table import ALWAYS, LRU, cases, trace_row, verdicts

LEAST_POINTS = 3


@pytest.fixture(scope="module", params=[0.05, 0.1])
def rows(request):
    """A row for the default policy, however it admits, and for LRU that admits all."""
    trace = RequestTrace.carried("synthetic")
    return [
        trace_row(trace, case)
        for case in cases(request.param)
        if case.eviction == "saved" or (case.eviction, case.admission) == (LRU, ALWAYS)
    ]


def test_the_default_saves_more_seconds_than_lru(rows):
    (told,) = verdicts(rows)
    assert told.over_lru >= LEAST_POINTS
    assert told.product_over_lru >= LEAST_POINTS
    assert told.under_better <= 1


@pytest.mark.parametrize("rows", [0.05], indirect=True)
def test_lru_is_the_reference_simulators(rows):
    (row,) = (one for one in rows if one.eviction == LRU)
    assert (round(row.tokens, 3), round(row.seconds, 3)) == (0.160, 0.158)
