# SPDX-License-Identifier: Apache-2.0
"""The default policy on a trace that comes along, at two capacities.

Replays are the same everywhere, so these are no measurements. All capacities: `make traces`.
"""

import pytest

from hillinfer_bench.traces.request_trace import RequestTrace
from hillinfer_bench.traces.table import Case, cases, trace_row, verdicts

LEAST_POINTS = 3


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_the_default_saves_more_seconds_than_lru(share):
    trace = RequestTrace.carried("synthetic")
    of_product = [case for case in cases(share) if case.eviction in ("saved", "lru")]
    (told,) = verdicts([trace_row(trace, case) for case in of_product])
    assert told.over_lru >= LEAST_POINTS
    assert told.product_over_lru >= LEAST_POINTS
    assert told.under_better <= 1


def test_lru_is_the_reference_simulators():
    trace = RequestTrace.carried("synthetic")
    row = trace_row(trace, Case("lru", "always", 0.05))
    assert (round(row.tokens, 3), round(row.seconds, 3)) == (0.160, 0.158)
