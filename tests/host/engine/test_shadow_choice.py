# SPDX-License-Identifier: Apache-2.0
"""`auto` takes INT4, or what leaves half the budget for rows, and says what it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillinfer.engine.budget_growth import AUTO_FORMATS, CachePlan, ShadowChoice
from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.errors import BudgetError, SettingsError
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings
from hillinfer.shadow.store import held_bytes, shadow_bytes
from hillinfer.values import ByteSize
from hillinfer_model.choices import KeyMode

# Llama-3.2-3B at 32k tokens: 3.5 GiB of rows.
SHAPE = ModelShape(
    layers=28,
    kv_heads=8,
    query_heads=24,
    head_dim=128,
    stored_type=StoredType.BFLOAT16,
    max_positions=131_072,
)
TOKENS = 32_768
MIB = 1 << 20


def settings_of(mib, shadow="auto", exact=1):
    budget = ByteSize(byte_count=int(mib * MIB))
    return Settings().changed(shadow=shadow, exact=exact, dram_budget=budget)


def chosen(mib, shadow="auto", exact=1):
    return ShadowChoice.of(SHAPE, settings_of(mib, shadow, exact), TOKENS)


# Codes are 1/4, 1/8 and 1/16 of the rows (896, 448 and 224 MiB), copies of probe tokens 1/16 of
# those, and staging 34 MiB.
@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (4096, KeyMode.INT4),
        (1960, KeyMode.INT4),
        (1080, KeyMode.INT4),
        (1040, KeyMode.INT2),
        (610, KeyMode.INT2),
    ],
)
def test_the_first_that_leaves_half(mib, expected):
    choice = chosen(mib)
    assert choice.settings.shadow is expected
    assert choice.warning is None
    assert choice.plan.hot_bytes >= choice.plan.budget_bytes / 2
    wider = AUTO_FORMATS[: AUTO_FORMATS.index(expected)]
    for mode in wider:
        plan = BudgetPlan.for_context(SHAPE, settings_of(mib, mode.value), TOKENS)
        assert plan.streamed_shadow_bytes or plan.hot_bytes < plan.budget_bytes / 2


@given(mib=st.integers(84, 5000))
def test_whatever_the_budget(mib):
    choice = chosen(mib)
    plan = choice.plan
    plan.check()
    assert plan.required_bytes <= plan.budget_bytes
    spec = kernel_spec(SHAPE, choice.settings)
    segments = TOKENS // 1024
    total = plan.shadow_bytes + plan.streamed_shadow_bytes
    # Shadows on the drive have no copy of their probe tokens.
    least, most = (segments * SHAPE.layers * one(spec) for one in (shadow_bytes, held_bytes))
    assert least <= total <= most
    assert plan.streamed_shadow_bytes or total == most
    assert choice.limit_bytes <= plan.shadow_bytes
    assert (choice.warning is None) == (plan.streamed_shadow_bytes == 0)
    if plan.streamed_shadow_bytes:
        assert choice.settings.shadow is KeyMode.INT2
    else:
        # Streaming would leave less where the shadow is smaller than its buffers.
        assert plan.leaves_half_for_rows


def test_streaming_leaves_half_for_rows_and_says_what_it_costs():
    choice = chosen(400)
    assert choice.plan.streamed_shadow_bytes > 0
    assert choice.plan.hot_bytes >= choice.plan.budget_bytes / 2
    assert 0 < choice.limit_bytes < choice.plan.shadow_bytes
    assert (
        "int2 key shadow stay on the drive, because half of a DRAM budget of 400.0 MiB"
        in choice.warning
    )
    assert "read for every new token" in choice.warning
    assert "raise --dram-budget" in choice.warning


def test_room_for_all_rows_is_enough():
    """A short context need not leave half of a large budget for rows it does not have."""
    small = ShadowChoice.of(SHAPE, settings_of(400), 1024)
    assert small.settings.shadow is KeyMode.INT4
    assert small.warning is None


@pytest.mark.parametrize("mib", [1080, 4096, 65_536])
def test_int8_is_taken_only_where_it_is_named(mib):
    assert chosen(mib).settings.shadow is KeyMode.INT4
    assert chosen(mib, "int8").settings.shadow is KeyMode.INT8


@pytest.mark.parametrize("mode", ["int8", "int4", "int2"])
def test_a_named_format_is_taken_and_stays_in_dram_while_it_can(mode):
    whole = BudgetPlan.with_whole_shadow(SHAPE, settings_of(1, mode), TOKENS)
    enough = chosen(whole.required_bytes / MIB, mode)
    assert enough.settings.shadow is KeyMode(mode)
    assert enough.plan.streamed_shadow_bytes == 0
    less = chosen((whole.required_bytes - 1) / MIB, mode)
    assert less.settings.shadow is KeyMode(mode)
    assert less.plan.streamed_shadow_bytes > 0
    assert mode in less.warning


def test_too_small_even_with_the_shadow_on_the_drive():
    with pytest.raises(BudgetError, match="even with the key shadow on the drive"):
        chosen(50).plan.check()


def test_a_format_still_to_be_chosen_has_no_kernel_spec():
    with pytest.raises(SettingsError, match="needs the length of the context"):
        kernel_spec(SHAPE, settings_of(400))


# --- Where tokens may come as codes ---


def least_coded(shadow="int4"):
    """The least budget, in MiB, of INT4 beside what coded tokens need."""
    plan = BudgetPlan.with_whole_shadow(SHAPE, settings_of(1, shadow, None), TOKENS)
    return plan.required_bytes / MIB


@pytest.mark.parametrize("shadow", ["auto", "int4"])
def test_tokens_are_coded_as_long_as_int4_and_their_tables_fit(shadow):
    choice = chosen(least_coded(), shadow, None)
    assert choice.settings.has_coded_tokens
    assert choice.settings.shadow is KeyMode.INT4
    assert (choice.settings.importance_rate, choice.settings.exact_share) == (0.2, 0.02)
    assert choice.plan.streamed_shadow_bytes == 0
    # With all exact INT4 does not leave half for rows there.
    assert chosen(least_coded()).settings.shadow is KeyMode.INT2


@pytest.mark.parametrize("shadow", ["auto", "int4", "int2"])
def test_below_that_all_tokens_are_exact_as_before(shadow):
    for mib in (least_coded() - 1, 300, 200):
        choice, before = (chosen(mib, shadow, exact) for exact in (None, 1))
        assert choice.settings.importance_rate == 0.1
        assert not choice.settings.has_coded_tokens
        assert choice.plan == before.plan
        assert choice.settings.shadow is before.settings.shadow


def test_what_was_chosen_stays_however_little_there_is():
    choice = chosen(200, "int4", 0.02)
    assert choice.settings.has_coded_tokens
    assert choice.plan.streamed_shadow_bytes > 0


def test_nothing_is_coded_in_a_budget_of_bytes_that_the_longest_context_outgrows():
    longest = BudgetPlan.with_whole_shadow(SHAPE, settings_of(1, "int4", None), SHAPE.max_positions)
    for byte_count, is_coded in (
        (longest.required_bytes, True),
        (longest.required_bytes - 1, False),
    ):
        settings = settings_of(byte_count / MIB, "int4", None)
        plan = CachePlan.of(SHAPE, settings, None, 1)
        assert plan.settings.has_coded_tokens == is_coded
