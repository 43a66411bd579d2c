# SPDX-License-Identifier: Apache-2.0
"""Every short context has a budget that works, whatever share was asked for."""

from dataclasses import replace

import pytest

from hillinfer.engine.budget_growth import BudgetGrowth, FollowingBudget, ShadowChoice
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import BudgetError
from hillinfer.memory_budget import Accountant, Part
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.models.needs import ContextNeeds
from hillinfer.settings import Settings
from hillinfer.values import ByteSize, format_apart

SMOLLM2 = ModelShape(30, 3, 9, 64, StoredType.FLOAT16, 8192)
LLAMA = ModelShape(32, 8, 32, 128, StoredType.BFLOAT16, 131_072)
OPT = ModelShape(32, 32, 32, 128, StoredType.FLOAT16, 2048)
SHAPES = {"smollm2-135m": SMOLLM2, "llama-3.1-8b": LLAMA, "opt-6.7b": OPT}
MOST = 3000
# Every one where kept tokens and least counts decide, and about where a segment begins.
SHORT = sorted(
    {*range(1, 300), *range(1000, 1100), *range(2040, 2060), *range(300, MOST + 1, 7), MOST}
)


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def works(plan):
    return plan.budget_bytes >= plan.required_bytes


def needs(shape, **changes):
    return ContextNeeds(
        shape=shape,
        settings=Settings().changed(shadow="auto"),
        budget=None,
        loading_bytes=0,
        activation_bytes=0,
        **changes,
    )


def test_the_command_plans_every_short_context(shape):
    default = needs(shape)
    refused = [tokens for tokens in SHORT if not works(default.plan(tokens))]
    assert refused == []


@pytest.mark.parametrize("reserved", [1, 64])
@pytest.mark.parametrize("fork_bytes", [0, 100_000, 5_000_000])
def test_answers_and_forks_have_room_too(shape, reserved, fork_bytes):
    one = needs(shape, reserved_tokens=reserved, fork_bytes=fork_bytes)
    share = replace(one, budget=ByteSize.parse("25%"))
    for tokens in (*range(1, 201, 13), *range(1000, MOST, 333)):
        assert works(one.plan(tokens + reserved)), tokens
        assert works(share.plan(tokens + reserved)), tokens


def test_python_plans_every_short_context_in_memory(shape):
    plans = [ShadowChoice.of(shape, Settings(), tokens).plan for tokens in SHORT[::2]]
    for plan in plans:
        plan.check()
        # Buffers are as large for one token as for many, so the least is far from none.
        assert plan.budget_bytes >= max(plan.required_bytes, plan.kv_bytes // 4)
        assert plan.budget_bytes == max(plan.required_bytes, plan.kv_bytes // 4)


@pytest.mark.parametrize("shadow", ["auto", "int8", "int4", "int2"])
@pytest.mark.parametrize("share", ["0.001%", "5%", "25%", "100%"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_any_share_works_and_is_kept_where_it_can_be(shape, shadow, share, sequences):
    settings = Settings().changed(shadow=shadow, dram_budget=share)
    for tokens in (1, 2, 35, 36, 37, 1023, 1025, 2048, MOST, 40_000):
        plan = ShadowChoice.of(shape, settings, tokens, sequences).plan
        plan.check()
        asked = settings.dram_budget.resolve(plan.kv_bytes)
        assert plan.budget_bytes >= asked
        if plan.budget_bytes > asked:
            given = settings.changed(dram_budget=ByteSize(byte_count=max(1, asked)))
            small = ShadowChoice.of(shape, given, tokens, sequences).plan
            with pytest.raises(BudgetError):
                small.check()


@pytest.mark.parametrize("kept_recent", [1, 32, 5000])
def test_kept_rows_are_no_more_than_the_context_has(shape, kept_recent):
    settings = Settings().changed(kept_recent=kept_recent, shadow="int4")
    for tokens in (1, 5, 36, 200):
        plan = BudgetPlan.with_whole_shadow(shape, settings, tokens)
        assert plan.kept_bytes <= plan.all_rows_bytes
        assert plan.required_bytes <= plan.comfortable_bytes
        assert (plan.kept_bytes == plan.all_rows_bytes) == (tokens <= settings.kept_tokens)


# --- a context of unknown length -----------------------------------------------------------


def growth(shape, share, most_bytes=1 << 50):
    settings = Settings().changed(dram_budget=share)
    return BudgetGrowth(shape, settings, planned_tokens=1024, most_bytes=most_bytes)


@pytest.mark.parametrize("share", ["3%", "10%", "25%", "150%"])
def test_it_follows_the_share_as_soon_as_that_works(shape, share):
    one = growth(shape, share)
    lengths = range(1024, min(65_536, 2 * shape.max_positions), 1024)
    for tokens in lengths:
        budget = one.at(tokens)[0]
        asked = one.settings.dram_budget.resolve(tokens * shape.token_bytes)
        assert budget >= asked
        # What works is no more than the least that has the shadow in memory.
        whole = BudgetPlan.with_whole_shadow(shape, one.settings, tokens).required_bytes
        assert budget <= max(asked, whole)


def test_shadows_stay_where_the_share_holds_those_of_the_longest_context():
    assert growth(LLAMA, "25%").at(4096)[1] > 1 << 50
    budget, limit = growth(LLAMA, "10%").at(40_960)
    assert budget == 4096 * LLAMA.token_bytes
    assert 0 < limit < budget


def test_no_share_is_more_than_memory():
    assert growth(LLAMA, "100%", most_bytes=1 << 30).at(131_072)[0] < 3 << 30
    assert growth(LLAMA, "100%").at(131_072)[0] == 131_072 * LLAMA.token_bytes


def test_a_following_budget_only_rises_and_in_steps():
    one, accountant, limits = growth(LLAMA, "50%"), Accountant(5), []
    following = FollowingBudget(one, accountant, limits.append)
    found = []
    for tokens in (1, 1024, 1025, 1500, 9000, 2000, 9216, 9217):
        following.cover(tokens)
        found.append(accountant.budget_bytes)
    steps = [5, 5, *[one.at(2048)[0]] * 2, *[one.at(9216)[0]] * 3, one.at(10_240)[0]]
    assert found == steps
    assert limits == [one.at(tokens)[1] for tokens in (2048, 9216, 10_240)]


def test_what_must_be_held_raises_a_budget_that_may_grow_and_no_other():
    fixed, growing = Accountant(100), Accountant(100)
    growing.let_grow(lambda: 7)
    for one in (fixed, growing):
        one.take(Part.OTHER, 90)
    with pytest.raises(BudgetError):
        fixed.take(Part.SHADOW, 20)
    growing.take(Part.SHADOW, 20)
    assert (fixed.budget_bytes, growing.budget_bytes) == (100, 117)
    # Rows that would be pleasant to have in memory raise nothing.
    assert not growing.take_spare(Part.HOT, 8)
    assert growing.take_spare(Part.HOT, 7)
    assert growing.budget_bytes == 117


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (5 << 20, 6 << 20, ("5.0 MiB", "6.0 MiB")),
        (14_365_000, 14_366_000, ("13.6995 MiB", "13.7005 MiB")),
        ((14 << 20) - 1, 14 << 20, ("14680063 B", "14680064 B")),
        (1 << 40, (1 << 40) + 1, ("1099511627776 B", "1099511627777 B")),
        (512, 513, ("512 B", "513 B")),
        (512, 512, ("512 B", "512 B")),
    ],
)
def test_two_sizes_that_differ_look_different(one, other, texts):
    assert format_apart(one, other) == texts


def test_a_budget_a_little_too_small_is_refused_with_two_numbers():
    plan = BudgetPlan.with_whole_shadow(SMOLLM2, Settings(), 30)
    with pytest.raises(BudgetError) as error:
        replace(plan, budget_bytes=plan.required_bytes - 1000).check()
    budget, _, rest = str(error.value).partition(" is too small: this context needs ")
    assert budget.removeprefix("the DRAM budget of ") != rest.partition(" (")[0]
