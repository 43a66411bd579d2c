# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a decode step on a plain drive follows from rates and budget."""

import pytest

from hillinfer.doctor.profile import PlainStep
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import BudgetError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.rates.kept_rates import Rates
from hillinfer.settings import Settings
from hillinfer.values import ByteSize, format_bytes

SHAPE = ModelShape(4, 8, 32, 64, StoredType.FLOAT16, 1 << 20)
RATES = Rates(f_c=1e7, f_s=0, b_c=5e6, b_s=1e5)
TOKENS = 32_768


def step(budget, rates=RATES, weights=10**7, **changes):
    chosen = {"exact": 1} | changes
    settings = Settings().changed(dram_budget=ByteSize.parse(budget), **chosen)
    return PlainStep(SHAPE, settings, TOKENS, rates, weights, 1e9)


def test_costs_add():
    made = step("40%")
    cold = TOKENS - made.hosted
    assert 0 < cold < TOKENS
    assert made.reading_seconds == pytest.approx(0.1 * cold / 1e5)
    assert made.computing_seconds == pytest.approx(0.01)
    assert made.layer_seconds == pytest.approx(
        TOKENS / 1e7 + 0.1 * made.hosted / 5e6 + 0.1 * cold / 1e5
    )
    # The other way to score changes nothing: there is nobody else.
    assert step("40%", Rates(1e7, 1e9, 5e6, 1e5)).layer_seconds == made.layer_seconds
    assert step("40%", Rates(2e7, 0, 5e6, 1e5)).layer_seconds < made.layer_seconds


def test_the_budget_decides():
    seconds = [step(budget).layer_seconds for budget in ("30%", "60%", "90%", "150%")]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4
    everything = step("150%")
    assert (everything.hosted, everything.reading_seconds) == (TOKENS, 0)


def test_few_selected_rows_are_few_reads():
    assert step("40%", max_selected=512).selected_share == 512 / TOKENS
    assert step("40%", max_selected=TOKENS).selected_share == 0.1


def test_a_shadow_that_is_streamed_takes_time():
    small, large = step("15%"), step("40%")
    assert large.streaming_seconds == 0
    rows = small.plan.streamed_shadow_bytes / SHAPE.row_bytes / SHAPE.layers
    assert rows > 0
    assert small.streaming_seconds == pytest.approx(rows / 1e5)


def test_findings_name_bytes_and_only_advise():
    made = step("15%")
    plan = BudgetPlan.for_context(SHAPE, made.settings, TOKENS)
    decode, query = made.findings("a shape")
    assert decode.name == "decode step of a shape"
    total = 4e3 * (made.layer_seconds + made.streaming_seconds)
    for text in (
        f"at most {total:.2f} ms of scoring and rows at {TOKENS} tokens",
        f"shadow {format_bytes(plan.shadow_bytes)} in DRAM",
        f"{format_bytes(plan.streamed_shadow_bytes)} streamed",
        f"rows of {TOKENS - made.hosted} tokens cold",
        "modelled: costs add, the budget decides",
    ):
        assert text in decode.found
    reads = 1e3 * made.reading_seconds
    assert reads > 10
    assert f"hides up to 10.00 ms of {reads:.2f} ms of reads per layer" in query.found
    assert "behind 10.00 ms of compute" in query.found
    assert "changes which tokens are selected" in query.found
    assert query.fix is None


def test_no_more_is_hidden_than_there_is():
    _, query = step("40%", weights=10**9).findings("a shape")
    reads = 1e3 * step("40%").reading_seconds
    assert f"hides up to {reads:.2f} ms of {reads:.2f} ms" in query.found


def test_a_budget_that_holds_nothing_is_refused():
    with pytest.raises(BudgetError, match="too small"):
        list(step("1KiB").findings("a shape"))
