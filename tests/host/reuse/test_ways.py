# SPDX-License-Identifier: Apache-2.0
"""Tokens behind a stored prefix are read the sooner way."""

import pytest

from hillinfer.reuse.ways import PassRates, Way

GB = 10**9


@pytest.mark.parametrize(
    ("prefix_bytes", "tokens", "expected"),
    [
        (2 * GB, 64, Way.IN_PLACE),
        (2 * GB, 200, Way.STREAMED),
        (2 * GB, 100, Way.IN_PLACE),
        (2 * GB, 101, Way.STREAMED),
        (0, 1, Way.STREAMED),
    ],
)
def test_the_sooner_way_is_taken(prefix_bytes, tokens, expected):
    assert PassRates(GB, 0.02).way(prefix_bytes, tokens) is expected
    # Twice the passes stream twice; what is read singly must be so much sooner.
    assert PassRates(2 * GB, 0.02).way(prefix_bytes, tokens, passes=2) is expected
    assert PassRates(GB, 0.02, least_saving_seconds=2.1).way(prefix_bytes, tokens) is Way.STREAMED
    # The twin: on a drive that is ten thousand times faster all rows stream.
    assert PassRates(10_000 * GB, 0.02).way(prefix_bytes, tokens) is Way.STREAMED
