# SPDX-License-Identifier: Apache-2.0
"""The default policy on the traces that come along, at one capacity of each.

Replays are the same everywhere, so these are no measurements. All capacities: `make traces`.
"""

import pytest

from hillinfer_bench.traces.request_trace import RequestTrace
from hillinfer_bench.traces.table import Case, cases, trace_row, verdicts

# Trace, capacity, least points over LRU.
GOALS = [("conversation", 0.02, -0.5), ("synthetic", 0.05, 3), ("synthetic", 0.1, 3)]


@pytest.mark.parametrize(("name", "share", "least"), GOALS)
def test_the_default_saves_more_seconds_than_lru(name, share, least):
    trace = RequestTrace.carried(name)
    of_product = [case for case in cases(share) if case.eviction in ("saved", "lru")]
    (told,) = verdicts([trace_row(trace, case) for case in of_product])
    assert told.over_lru >= least
    assert told.product_over_lru >= least
    assert told.under_better <= 1


def test_lru_is_the_reference_simulators():
    trace = RequestTrace.carried("synthetic")
    row = trace_row(trace, Case("lru", "always", 0.05))
    assert (round(row.tokens, 3), round(row.seconds, 3)) == (0.160, 0.158)
