# SPDX-License-Identifier: Apache-2.0
"""What every selection policy promises, whatever it ranks by."""

from dataclasses import replace

import numpy as np
import pytest
from policy_cases import (
    KV_HEADS,
    ONE_SET,
    POLICIES,
    assert_same_sets,
    some_layer,
    some_settings,
)

from hillinfer_bench.quality.policies import RecentOnly
from hillinfer_model.selection import kept_positions, selected_count

# Shorter than the kept tokens, within the first segment, over the ends of segments and pages.
SIZES = [(1, 1), (9, 9), (60, 3), (520, 20), (1100, 4)]
ALPHAS = [0.05, 0.3, 1.0]


def check_sets(policy, layer, sets):
    """Count, kept tokens, order and range of every set of every query."""
    settings = policy.settings
    selected = policy.select(layer)
    assert len(selected) == len(layer.queries)
    for length, positions in zip(layer.lengths, selected, strict=True):
        count = selected_count(length, settings.alpha, settings.kept_tokens, settings.max_selected)
        assert positions.dtype == np.int64
        assert positions.shape == (sets, count)
        kept = kept_positions(length, settings.kept_sinks, settings.kept_recent)
        for one in positions:
            assert np.all(np.diff(one) > 0)
            assert one[0] >= 0
            assert one[-1] < length
            assert np.isin(kept, one).all()


def check_repeatable(make, settings, layer):
    assert_same_sets(make(settings).select(layer), make(settings).select(layer))
    policy = make(settings)
    first = policy.select(layer)
    policy.select(some_layer(len(layer.keys), len(layer.queries), seed=99))
    assert_same_sets(policy.select(layer), first)


def check_looks_back_only(policy, layer):
    """Other keys after the first query's token change nothing for it."""
    changed = layer.keys.clone()
    changed[layer.first_length :] *= -3
    assert_same_sets(
        policy.select(replace(layer, keys=changed))[:1],
        policy.select(layer)[:1],
    )


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("tokens", "queries"), SIZES)
@pytest.mark.parametrize("name", POLICIES)
def test_sets_have_the_right_tokens(name, tokens, queries, alpha):
    policy = POLICIES[name](some_settings(alpha=alpha))
    check_sets(policy, some_layer(tokens, queries), 1 if name in ONE_SET else KV_HEADS)


@pytest.mark.parametrize("name", POLICIES)
def test_an_upper_bound_binds(name):
    policy = POLICIES[name](some_settings(max_selected=20))
    assert {one.shape[-1] for one in policy.select(some_layer(520, 3))} == {20}


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_question_has_the_same_answer(name):
    check_repeatable(POLICIES[name], some_settings(), some_layer(520, 4))


@pytest.mark.parametrize("name", POLICIES)
def test_no_query_sees_later_tokens(name):
    check_looks_back_only(POLICIES[name](some_settings()), some_layer(530, 20))


class Broken(RecentOnly):
    """Recent tokens, spoilt in one way."""

    def __init__(self, settings, way):
        super().__init__(settings)
        self._spoil = getattr(self, way)
        self._calls = 0

    def select(self, layer):
        self._calls += 1
        return [self._spoil(one.copy(), layer) for one in super().select(layer)]

    def one_too_few(self, positions, layer):
        return positions[:, 1:]

    def sink_lost(self, positions, layer):
        positions[:, 0] = np.setdiff1d(np.arange(positions[0, -1]), positions[0])[0]
        return np.sort(positions)

    def unordered(self, positions, layer):
        return positions[:, ::-1]

    def twice_the_same(self, positions, layer):
        positions[:, 3] = positions[:, 4]
        return positions

    def beyond_the_query(self, positions, layer):
        positions[:, -1] = len(layer.keys)
        return positions

    def moody(self, positions, layer):
        positions[:, 3] -= self._calls
        return positions

    def clairvoyant(self, positions, layer):
        positions[:, 3] += int(layer.keys[-1, 0, 0] > 0)
        return positions


@pytest.mark.parametrize(
    "way", ["one_too_few", "sink_lost", "unordered", "twice_the_same", "beyond_the_query"]
)
def test_a_wrong_set_is_noticed(way):
    policy = Broken(some_settings(), way)
    with pytest.raises(AssertionError):
        check_sets(policy, some_layer(520, 3), 1)


def test_a_moody_policy_is_noticed():
    shared = Broken(some_settings(), "moody")
    with pytest.raises(AssertionError):
        check_repeatable(lambda settings: shared, some_settings(), some_layer(520, 3))


def test_a_clairvoyant_policy_is_noticed():
    with pytest.raises(AssertionError):
        check_looks_back_only(Broken(some_settings(), "clairvoyant"), some_layer(520, 3))
