# SPDX-License-Identifier: Apache-2.0
"""The hit-rate table: 2 bytes per token and layer, which saturate, grow, shrink and part."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.kv.pool_policies import POOL_POLICIES, make_pool_policy
from hillinfer.kv.sequence import Sequence
from hillinfer.native.tables import GROWTH_TOKENS, HIT_BYTES, room_for


def table_of(layers):
    return Sequence(layers, 8).hits


@pytest.mark.parametrize("name", POOL_POLICIES)
def test_entries_stop_at_the_largest_number_of_two_bytes(name):
    table = table_of(2)
    table.cover(1, 100)
    table.counts[1][:4] = [65_533, 65_534, 65_535, 7]
    policy = make_pool_policy(name)
    always = np.arange(3)
    for _ in range(80):
        policy.tally(table.counts[1], always)
        assert (table.counts[1][:3] > 60_000).all()
        assert table.counts[1].dtype == np.uint16
    assert table.counts[1][:3].tolist() == [65_535] * 3
    assert not table.counts[1][4:].any()


def test_growth_is_counted_before_it_happens_and_keeps_what_is_there():
    table = table_of(3)
    assert table.byte_count == 0
    tokens = (1, 5, GROWTH_TOKENS, GROWTH_TOKENS + 1, 70, 5 * GROWTH_TOKENS)
    expected = 0
    for mark, count in enumerate(tokens, start=1):
        growth = table.growth_bytes(0, count)
        table.cover(0, count)
        expected += growth
        assert table.byte_count == expected
        assert len(table.counts[0]) % GROWTH_TOKENS == 0
        assert len(table.counts[0]) >= count
        assert table.growth_bytes(0, count) == 0
        table.counts[0][count - 1] = mark
    assert table.counts[0][[0, 4, 69, GROWTH_TOKENS - 1, GROWTH_TOKENS]].tolist() == [1, 2, 5, 3, 4]
    assert np.count_nonzero(table.counts[0]) == len(tokens)
    assert table.byte_count == HIT_BYTES * room_for(tokens[-1])
    assert [len(counts) for counts in table.counts[1:]] == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "entries"), [(0, 0), (1, 1024), (1024, 1024), (1025, 2048), (131_072, 131_072)]
)
def test_room_comes_in_steps(tokens, entries):
    assert room_for(tokens) == entries


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, 3000), layers=st.integers(1, 3))
def test_truncation_drops_hits_in_every_layer_and_no_others(length, layers):
    sequence = Sequence(layers, 8)
    table = sequence.hits
    for layer in range(layers):
        table.cover(layer, 1000 * (layer + 1))
        table.counts[layer][:] = layer + 1
    size = table.byte_count
    sequence.truncate(length)
    for layer, counts in enumerate(table.counts):
        assert (counts[:length] == layer + 1).all()
        assert not counts[length:].any()
    assert table.byte_count == size


def test_a_copy_goes_on_by_itself():
    sequence = Sequence(2, 8)
    table = sequence.hits
    for layer in range(2):
        table.cover(layer, 10)
        table.counts[layer][3] = 5
    copy = sequence.fork().hits
    assert copy.byte_count == table.byte_count
    table.counts[0][3] = 6
    copy.counts[1][3] = 7
    copy.cover(1, 5000)
    sequence.truncate(0)
    assert [int(counts[3]) for counts in copy.counts] == [5, 7]
    assert [int(counts[3]) for counts in table.counts] == [0, 0]
    assert len(table.counts[1]) == GROWTH_TOKENS
