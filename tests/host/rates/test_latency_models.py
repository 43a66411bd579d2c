# SPDX-License-Identifier: Apache-2.0
"""What each model says, and that its closed form finds what trying everything finds."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hillinfer.errors import SettingsError
from hillinfer.rates.kept_rates import Rates, seconds_of
from hillinfer.rates.latency import (
    LATENCY_MODELS,
    AutoBeta,
    LatencyModel,
    ParallelScorers,
    ScoresThenRows,
    SelectedShares,
    SharedScorer,
    TwoLinkScorers,
)
from hillinfer.settings import ModelName

EVEN = SelectedShares(0.2, 0.2)
SKEWED = SelectedShares(0.35, 0.04)
RATES = Rates(f_c=8e6, f_s=3e6, b_c=5e6, b_s=4e5)
PARALLEL = (ParallelScorers, TwoLinkScorers, ScoresThenRows)


def some_rates(count=60):
    chance = np.random.default_rng(0)
    return [Rates(*(10.0 ** chance.uniform(3, 9, 4)).tolist()) for _ in range(count)]


def test_equation_4_as_printed():
    f_c, f_s, b_c, b_s, alpha = 8e6, 3e6, 5e6, 4e5, 0.2
    printed = b_c * f_c * (b_s + alpha * f_s) / (b_s * f_s * (b_c + alpha * f_c))
    assert ParallelScorers(RATES).beta(EVEN) == pytest.approx(printed, rel=1e-12)


def test_section_5_4_as_printed_and_the_model_it_solves():
    f_c, f_s, b_c, b_s, alpha = 8e6, 3e6, 5e6, 4e5, 0.2
    printed = (
        f_c
        * (b_s * b_c + alpha * b_c * f_s + alpha * b_s * f_s)
        / (b_s * f_s * (b_c + alpha * f_c))
    )
    model = TwoLinkScorers(RATES)
    assert model.beta(EVEN) == pytest.approx(printed, rel=1e-12)
    hosted = 10**9
    on_device = round(hosted / printed)
    host = hosted / f_c + alpha * hosted / b_c
    device = on_device / f_s + alpha * on_device / b_s + alpha * on_device / b_c
    assert host == pytest.approx(device, rel=1e-6)
    assert model.latency(hosted, on_device, EVEN) == pytest.approx(host, rel=1e-6)
    # It is no other name for equation 4.
    assert model.beta(EVEN) > 1.01 * ParallelScorers(RATES).beta(EVEN)


def test_equation_2_is_the_larger_side():
    model = ParallelScorers(RATES)
    assert model.latency(800, 0, SKEWED) == pytest.approx(800 / 8e6 + 0.35 * 800 / 5e6)
    assert model.latency(0, 300, SKEWED) == pytest.approx(300 / 3e6 + 0.04 * 300 / 4e5)
    both = model.latency(800, 300, SKEWED)
    assert both == max(model.latency(800, 0, SKEWED), model.latency(0, 300, SKEWED))


def test_the_skew_moves_tokens_to_the_device():
    # The host's side has more rows to move than α says, the device's fewer.
    for make in (ParallelScorers, TwoLinkScorers):
        assert make(RATES).beta(SKEWED) < make(RATES).beta(EVEN)
    # Rows that come after all scores change no β.
    rows_after = ScoresThenRows(RATES)
    assert rows_after.beta(SKEWED) == rows_after.beta(EVEN) == pytest.approx(8 / 3)


def test_rows_after_scores_come_behind_both_sides():
    model = ScoresThenRows(RATES, row_seconds=0.5)
    assert model.latency(800, 240, SKEWED) == pytest.approx(800 / 8e6 + 0.5)
    assert model.latency(0, 300, SKEWED) == pytest.approx(300 / 3e6 + 0.5)


@pytest.mark.parametrize("make", PARALLEL)
@pytest.mark.parametrize("shares", [EVEN, SKEWED], ids=["even", "skewed"])
def test_the_closed_form_is_the_least_of_all_whole_segments(make, shares):
    counts = set()
    for rates, segments, most in product(some_rates(), (1, 2, 7, 64), (0, 1, 5, 10**6)):
        model = make(rates)
        found = model.host_segments(segments, 1024, shares, most)
        # Every possibility, by the base class.
        right = LatencyModel.host_segments(model, segments, 1024, shares, most)

        def seconds(host, model=model, segments=segments):
            return model.latency(1024 * host, 1024 * (segments - host), shares)

        assert 0 <= found <= min(segments, most)
        assert seconds(found) == pytest.approx(seconds(right), rel=1e-12)
        counts.add(found)
    # The cases are not all at one end.
    assert len(counts) > 10


@pytest.mark.parametrize("segments", [1, 2, 7, 64])
def test_the_closed_form_is_the_least_with_a_cost_of_sharing(segments):
    ends, between = 0, 0
    for rates, relative, most in product(
        some_rates(), (0, 0.03, 0.3, 0.9, 3, math.inf), (0, 1, 5, segments - 1, 10**6)
    ):
        # In terms of what the host alone takes, so that it decides something.
        sharing = relative * segments * 1024 / rates.f_c
        model = ScoresThenRows(replace(rates, sharing=sharing), row_seconds=1e-3)
        found = model.host_segments(segments, 1024, EVEN, most)
        limit = min(segments, most)
        seconds = [model.latency(1024 * n, 1024 * (segments - n), EVEN) for n in range(limit + 1)]
        assert found == (seconds.index(min(seconds)) if min(seconds) < math.inf else limit) or (
            seconds[found] == pytest.approx(min(seconds), rel=1e-12)
        )
        ends += found == segments
        between += 0 < found < segments
    # The cases are not all at one end.
    assert ends > 100
    assert between > 100 or segments == 1


def test_sharing_costs_as_much_for_one_segment_as_for_all():
    model = ScoresThenRows(Rates(f_c=1e6, f_s=1e6, b_c=1e6, b_s=1e6, sharing=0.25))
    assert model.latency(1000, 0, EVEN) == pytest.approx(1e-3)
    assert model.latency(999, 1, EVEN) == pytest.approx(0.999e-3 + 0.25)
    assert model.latency(0, 1000, EVEN) == pytest.approx(1e-3 + 0.25)
    # The paper's models have no such term.
    for make in (ParallelScorers, TwoLinkScorers):
        dear, free = (make(replace(RATES, sharing=sharing)) for sharing in (0.25, 0.0))
        assert dear.latency(500, 500, EVEN) == free.latency(500, 500, EVEN)
        assert dear.host_segments(64, 1024, EVEN, 64) == free.host_segments(64, 1024, EVEN, 64)


def test_the_host_stays_alone_until_sharing_pays():
    # Two equal sides save half of the host's 1 ms per segment, of 16 segments 8 ms.
    model = ScoresThenRows(Rates(f_c=1.024e6, f_s=1.024e6, b_c=1, b_s=1, sharing=0.0079))
    found = [model.host_segments(count, 1024, EVEN, count) for count in range(1, 31)]
    assert found == [*range(1, 16), *(count // 2 for count in range(16, 31))]
    # Where memory has no room for all, sharing is no choice.
    assert model.host_segments(10, 1024, EVEN, 9) == 5
    # The twin: without the cost it is half from the start.
    free = ScoresThenRows(replace(model.rates, sharing=0.0))
    assert [free.host_segments(count, 1024, EVEN, count) for count in (10, 16)] == [5, 8]


def test_one_segment_off_is_worse():
    """The twin: the least is a least."""
    model = ParallelScorers(Rates(f_c=2e6, f_s=1e6, b_c=math.inf, b_s=math.inf))
    assert model.host_segments(30, 1024, EVEN, 30) == 20
    best = model.latency(20 * 1024, 10 * 1024, EVEN)
    assert model.latency(19 * 1024, 11 * 1024, EVEN) > best
    assert model.latency(21 * 1024, 9 * 1024, EVEN) > best


def test_memory_bounds_the_host():
    model = ParallelScorers(Rates(f_c=9e6, f_s=1e6, b_c=math.inf, b_s=math.inf))
    assert [model.host_segments(10, 1024, EVEN, most) for most in (20, 9, 4, 0)] == [9, 9, 4, 0]


@pytest.mark.parametrize("make", PARALLEL)
def test_sides_that_never_end_or_take_no_time(make):
    def host_of(**changed):
        rates = Rates(**{"f_c": 1e6, "f_s": 1e6, "b_c": 1e9, "b_s": 1e9, **changed})
        return make(rates).host_segments(8, 1024, EVEN, 8), make(rates).beta(EVEN)

    assert host_of(f_s=0) == (8, math.inf)
    assert host_of(f_c=0) == (0, 0.0)
    # Neither answers: the host is the one that is there.
    assert host_of(f_c=0, f_s=0) == (8, math.inf)
    at_once = {"f_c": math.inf, "b_c": math.inf}
    assert host_of(**at_once) == (8, math.inf)
    never_slow = {**at_once, "f_s": math.inf, "b_s": math.inf}
    assert host_of(**never_slow) == (0, 0.0)
    assert make(RATES).host_segments(0, 1024, EVEN, 8) == 0
    assert make(RATES).latency(0, 0, EVEN) == 0


def test_without_a_device_memory_gets_all_there_is_room_for():
    model = SharedScorer(Rates(f_c=1e6, f_s=0, b_c=5e6, b_s=1e5))
    assert model.latency(300, 700, EVEN) == pytest.approx(
        1000 / 1e6 + 0.2 * 300 / 5e6 + 0.2 * 700 / 1e5
    )
    assert [model.host_segments(10, 1024, EVEN, most) for most in (4, 99)] == [4, 10]
    # Where the drive is the faster one, none.
    slow_memory = SharedScorer(Rates(f_c=1e6, f_s=0, b_c=1e4, b_s=1e5))
    assert slow_memory.host_segments(10, 1024, EVEN, 99) == 0


def test_every_name_has_a_model():
    assert set(LATENCY_MODELS) == set(ModelName)
    assert all(make(RATES).latency(10, 10, EVEN) > 0 for make in LATENCY_MODELS.values())


def test_running_shares_are_means_of_all_that_was_scored():
    running = AutoBeta(ParallelScorers(RATES), 1024, 0.1, 8)
    assert running.shares == SelectedShares(0.1, 0.1)
    running.note(1000, 300, 0, 0)
    running.note(1000, 100, 4000, 40)
    assert running.shares == SelectedShares(0.2, 0.01)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "1e6", True, None])
def test_what_is_no_rate_is_refused(wrong):
    with pytest.raises(SettingsError, match=r"b_c=.* is no rate"):
        Rates(1.0, 1.0, wrong, 1.0)
    with pytest.raises(SettingsError, match=r"sharing=.* is no rate"):
        Rates(1.0, 1.0, 1.0, 1.0, wrong)
    assert seconds_of(0, 0) == 0
    assert seconds_of(3, 0) == math.inf
    assert seconds_of(3, math.inf) == 0
