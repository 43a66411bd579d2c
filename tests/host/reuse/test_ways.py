# SPDX-License-Identifier: Apache-2.0
"""Tokens behind a stored prefix are read the sooner way."""

import pytest

from hillinfer.model_shape import ModelShape
from hillinfer.reuse.ways import NoRates, PassRates, Way, WayChooser

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


def test_one_set_is_chosen_where_its_bound_is_below_both_others():
    shape = ModelShape(32, 8, 32, 128, "float16", 1 << 17)
    before = 10_000

    def chosen(rates, tokens, alpha=0.1, chunk=None):
        return WayChooser(Known(rates), shape, chunk).question_way(before, tokens, alpha)

    # Rows of a page each: α of the bytes, and 32 queries that take a step at most.
    stored = before * shape.token_bytes
    assert shape.row_bytes == 4096
    told = chosen(PassRates(GB, 0.01), 200)
    assert told.way == "one set"
    assert told.is_read_by_one_set
    assert told.one_set_seconds == pytest.approx(0.32 + 0.1 * stored / GB)
    assert told.one_set_seconds < told.streamed_seconds < told.in_place_seconds
    # A short question reads token by token; a fast drive streams all; few seconds decide nothing.
    assert chosen(PassRates(GB / 10, 0.01), 20).way == "opened in place"
    assert chosen(PassRates(100 * GB, 0.01), 200).way == "streamed"
    assert chosen(PassRates(GB, 0.01, least_saving_seconds=5.0), 200).way == "streamed"
    assert chosen(PassRates(GB, 0.01), 200, alpha=1.0).way == "streamed"
    assert chosen(PassRates(GB, 0.01), 1).way == "opened in place"
    unknown = WayChooser(NoRates("nobody measured"), shape, None).question_way(before, 200, 0.1)
    assert (unknown.way, unknown.one_set_seconds) == ("streamed", None)


class Known:
    """Rates that are the same wherever they are asked for."""

    def __init__(self, rates):
        self._rates = rates

    def at(self, before, prefix_bytes, tokens):
        return self._rates
