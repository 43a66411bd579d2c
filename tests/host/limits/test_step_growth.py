# SPDX-License-Identifier: Apache-2.0
"""What a decode step's growth is put down to, and when the goal is met (`make space`)."""

import pytest

from space_lengths import (
    SLACK_BYTES,
    beside_scoring,
    goal_records,
    growth_of,
    seconds_per_token_alone,
)
from step_growth import StepGrowth, StepPoint

LENGTHS = (4104, 16_392, 262_152)
TOKEN_BYTES = {"int8": 1032, "int4": 520}


def points(per_byte=1e-10, per_token=0.0, fixed=0.001, lengths=LENGTHS, extra=lambda tokens: 0.0):
    return [
        StepPoint(
            shadow,
            tokens,
            tokens * size,
            fixed + per_byte * tokens * size + per_token * tokens + extra(tokens),
        )
        for tokens in lengths
        for shadow, size in TOKEN_BYTES.items()
    ]


def test_what_grows_with_bytes_alone_is_put_down_to_bytes():
    fit = StepGrowth.of(points())
    assert fit.fixed_seconds == pytest.approx(0.001)
    assert fit.bytes_per_second == pytest.approx(1e10)
    assert fit.seconds_per_token == pytest.approx(0, abs=1e-12)
    assert fit.largest_residual == pytest.approx(0, abs=1e-6)
    for one in fit.formats:
        assert one.unexplained_share == pytest.approx(0, abs=1e-6)


def test_what_grows_with_tokens_is_told_from_bytes():
    """One format's line would be as straight, and say that bytes explain all of it."""
    fit = StepGrowth.of(points(per_token=5.2e-8))
    assert fit.bytes_per_second == pytest.approx(1e10)
    assert fit.seconds_per_token == pytest.approx(5.2e-8)
    assert fit.largest_residual == pytest.approx(0, abs=1e-6)
    # As much for a token of INT4 as its 520 bytes take.
    wide, narrow = fit.formats
    assert narrow.unexplained_share == pytest.approx(0.5)
    assert wide.unexplained_share == pytest.approx(52 / 155.2)
    assert fit.worst is narrow
    assert narrow.by_tokens == pytest.approx(narrow.by_bytes)


def test_what_bends_is_in_the_residual():
    straight, bent = (
        StepGrowth.of(points(extra=lambda tokens, part=part: part * tokens**2))
        for part in (0.0, 1e-11)
    )
    assert straight.largest_residual < 1e-6 < 0.05 < bent.largest_residual
    assert bent.worst.unexplained_share > 0.5


def test_bytes_that_cost_nothing_have_no_rate():
    assert StepGrowth.of(points(per_byte=-1e-12, per_token=1e-7)).bytes_per_second is None
    shrinking = StepGrowth.of(points(per_byte=-1e-12, fixed=1.0))
    assert shrinking.worst.unexplained_share == 1


def test_one_format_or_one_context_tells_nothing():
    assert StepGrowth.of([one for one in points() if one.shadow == "int8"]) is None
    assert StepGrowth.of(points(lengths=LENGTHS[:1])) is None
    assert StepGrowth.of(points(lengths=LENGTHS[:2])) is not None


def figures(median, spread=0.05):
    return {"minimum": median, "median": median, "spread": spread, "flagged": spread > 0.2}


def measured(beyond=0, peak=900, selected=64, spread=0.05, **growing):
    """Return points as the report has them; the spread is that of one CPU time alone."""
    return [
        {
            "shadow": one.shadow,
            "tokens": one.tokens,
            "shadow_bytes": one.shadow_bytes,
            "seconds_per_step": figures(one.seconds),
            "cpu_seconds_per_step": figures(one.seconds, spread if number == 3 else 0.05),
            "selected_tokens_of_last_step": selected if number == 3 else 64,
            "dram_peak_bytes": peak if number == 3 else 900,
            "dram_budget_bytes": 1000,
            "beyond_m0_bytes": beyond if number == 3 else 0,
        }
        for number, one in enumerate(points(**growing))
    ]


def goals(**changes):
    rows = measured(**changes)
    return goal_records(rows, growth_of(rows))


def met(**changes):
    return [goal["met"] for goal in goals(**changes)]


def test_every_goal_is_met_by_bytes_alone_under_m0():
    wall, cpu, counted, process = goals()
    assert [goal["met"] for goal in (wall, cpu, counted, process)] == [True] * 4
    assert (wall["reached"], wall["flagged"]) == (pytest.approx(0, abs=1e-3), False)
    assert counted["reached"] == 0.9
    assert process["reached"] == 0


def test_each_goal_is_missed_for_its_own_reason():
    # 10.4 s of 114.4 and 5.2 of 57.2 would be met; INT4 is the worst.
    assert met(per_token=5.2e-9) == [True] * 4
    assert met(per_token=6.2e-9) == [False, False, True, True]
    assert met(spread=0.25) == [True, False, True, True]
    assert met(peak=1000) == [True] * 4
    assert met(peak=1001) == [True, True, False, True]
    assert met(beyond=SLACK_BYTES) == [True] * 4
    assert met(beyond=SLACK_BYTES + 1) == [True, True, True, False]


def test_rows_that_name_the_worst():
    wall, cpu, counted, process = goals(per_token=6.2e-9, spread=0.25, peak=1001, beyond=3 << 20)
    assert (wall["row"], wall["flagged"]) == ("int4", False)
    assert (cpu["row"], cpu["flagged"]) == ("int4", True)
    assert (counted["row"], counted["reached"]) == ("int4 at 16392 tokens", 1.001)
    assert (process["row"], process["reached"]) == ("all formats at 16392 tokens", 3.0)


@pytest.mark.parametrize("lengths", [(4104, 65_536), (16_392, 262_152)])
def test_contexts_that_do_not_reach_are_not_judged(lengths):
    assert met(lengths=lengths) == [None] * 4


def test_growth_with_another_number_of_selected_rows_is_not_judged():
    assert met(selected=65) == [None, None, True, True]


def test_one_format_is_not_judged():
    rows = [one for one in measured() if one["shadow"] == "int8"]
    wall, cpu, counted, _ = goal_records(rows, growth_of(rows))
    assert [wall["met"], cpu["met"], counted["met"]] == [None, None, True]
    assert wall["reached"] is None


def test_what_is_not_scoring_is_the_steps_growth_less_that_of_scoring():
    grown = [
        {
            "shadow": "int8",
            "tokens": tokens,
            "seconds_per_step": figures(step),
            "cpu_seconds_per_step": figures(1.0),
            "scoring_seconds": figures(scoring),
            "scoring_cpu_seconds": figures(1.0),
        }
        # The longest context need not come last.
        for tokens, step, scoring in ((4096, 3.0, 2.0), (65_536, 13.0, 9.5), (16_384, 99.0, 1.0))
    ]
    # 10 s of growth, 7.5 of them scoring; CPU time did not grow.
    assert beside_scoring(grown) == {"wall": {"int8": pytest.approx(0.25)}}


def alone(**rates):
    return {
        shadow: {
            "layer_bytes_per_token": TOKEN_BYTES[shadow],
            "scored_bytes_per_second": {"median": rate},
        }
        for shadow, rate in rates.items()
    }


def test_what_scoring_takes_per_token_is_what_its_bytes_leave():
    # A nanosecond for 10 bytes, and 20 nanoseconds a token whatever its bytes.
    rates = {shadow: size / (size * 1e-10 + 2e-8) for shadow, size in TOKEN_BYTES.items()}
    assert seconds_per_token_alone(alone(**rates)) == pytest.approx(2e-8)
    # The twin: at the same rate there is nothing left.
    assert seconds_per_token_alone(alone(int8=1e10, int4=1e10)) == pytest.approx(0, abs=1e-15)
    assert seconds_per_token_alone(alone(int8=1e10)) is None
