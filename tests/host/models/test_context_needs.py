# SPDX-License-Identifier: Apache-2.0
"""What a context takes, and the largest that fits."""

from dataclasses import replace

import pytest
import torch
from tiny_models import TinyModel

from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import BudgetError, FitError
from hillinfer.hf.attach import Attachment
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.models.needs import Capacity, ContextNeeds
from hillinfer.settings import Encryption, Settings
from hillinfer.values import ByteSize

MIB = 1 << 20
SHAPE = ModelShape(
    layers=30,
    kv_heads=3,
    query_heads=9,
    head_dim=64,
    stored_type=StoredType.FLOAT16,
    max_positions=8192,
)
ENDLESS = Capacity(memory_bytes=1 << 50, drive_bytes=1 << 50)


def needs(budget="25%", **changes):
    return ContextNeeds(
        shape=SHAPE,
        settings=changes.pop("settings", Settings()),
        budget=ByteSize.parse(budget) if budget else None,
        loading_bytes=500 * MIB,
        activation_bytes=50 * MIB,
        **changes,
    )


def test_everything_fits_a_large_machine():
    assert needs().largest_context(ENDLESS) == SHAPE.max_positions
    needs().check(8192, ENDLESS)


@pytest.mark.parametrize("budget", [None, "25%", "64MiB", "200MiB"])
@pytest.mark.parametrize("memory", [600, 615, 640, 10_000])
@pytest.mark.parametrize("drive", [20, 100, 10_000])
def test_largest_context_fits_and_one_more_does_not(budget, memory, drive):
    capacity = Capacity(memory * MIB, drive * MIB)
    one = needs(budget)
    largest = one.largest_context(capacity)
    if largest:
        one.check(largest, capacity)
    if largest < SHAPE.max_positions:
        with pytest.raises((FitError, BudgetError)):
            one.check(largest + 1, capacity)


def test_a_chunk_longer_than_the_context_takes_what_the_context_takes():
    for chunk in (512, 2048, 1 << 62):
        long = replace(needs(), activation_bytes=chunk << 20, chunk_tokens=chunk)
        assert long.footprint(512).activation_bytes == 512 << 20
        assert long.footprint(8192).activation_bytes == min(chunk, 8192) << 20


def test_packed_projections_take_from_what_fits():
    plain, packed = needs(), needs(packed_bytes=128 * MIB)
    added = packed.footprint(4000).memory_bytes - plain.footprint(4000).memory_bytes
    assert added == 128 * MIB
    capacity = Capacity(plain.footprint(4000).memory_bytes, 1 << 50)
    plain.check(4000, capacity)
    with pytest.raises(FitError, match=r"packed projections 128\.0 MiB"):
        packed.check(4000, capacity)


def test_parts_add_up():
    footprint = needs(ordinary_token_bytes=1000).footprint(8000)
    kv_bytes = 8000 * SHAPE.token_bytes
    assert footprint.budget_bytes == kv_bytes // 4
    # Of each layer codes and exponents of full groups, in multiples of 64 bytes.
    assert footprint.drive_bytes == kv_bytes + 30 * 8000 * 128
    assert footprint.ordinary_bytes == 8_000_000
    assert footprint.memory_bytes == 550 * MIB + kv_bytes // 4 + 8_000_000


@pytest.mark.parametrize("without", [{"exact": 1.0}, {"encrypt_cold_pool": Encryption.YES}])
def test_rows_alone_are_on_the_drive_where_no_codes_are_written(without):
    footprint = needs(settings=Settings(**without)).footprint(8000)
    assert footprint.drive_bytes == 8000 * SHAPE.token_bytes


def test_a_session_brings_its_rows_and_codes_are_copied():
    whole, saved = needs().footprint(8000), needs(stored_tokens=7000).footprint(8000)
    assert whole.drive_bytes - saved.drive_bytes == 7000 * SHAPE.token_bytes


@torch.no_grad()
def test_a_prompt_writes_the_codes_that_are_estimated(cold_dir):
    model = TinyModel().build()
    shape = ModelShape.from_config(model.config, torch.float32)
    settings = Settings().changed(exact=0.02, cold_dir=cold_dir)
    one = replace(needs("60%", settings=settings), shape=shape)
    with Attachment(model, one.choice(2100).settings) as hill:
        cache = hill.new_cache(expected_tokens=2100)
        model(torch.arange(2100)[None] % 50, past_key_values=cache, logits_to_keep=1)
        written = cache.statistics().code_write_bytes
    estimated = one.footprint(2100).drive_bytes - 2100 * shape.token_bytes
    assert 0 < written == estimated
    # The twin: fewer groups have fewer codes.
    assert written > one.footprint(1984).drive_bytes - 1984 * shape.token_bytes


def test_share_leaves_out_tokens_that_may_stay_unused():
    budget = needs(reserved_tokens=1000).footprint(8000).budget_bytes
    assert budget == 7000 * SHAPE.token_bytes // 4


def test_default_budget_is_a_quarter_or_the_least_that_works():
    assert needs(None).footprint(8000).budget_bytes == 8000 * SHAPE.token_bytes // 4
    short = needs(None)
    least = BudgetPlan.with_whole_shadow(SHAPE, Settings(), 100).required_bytes
    assert short.footprint(100).budget_bytes == least > 100 * SHAPE.token_bytes
    short.check(100, ENDLESS)
    assert short.raised_budget(100) is None


def test_a_share_of_a_short_context_is_raised_and_said():
    share, least = needs("25%"), BudgetPlan.with_whole_shadow(SHAPE, Settings(), 100)
    share.check(100, ENDLESS)
    assert share.footprint(100).budget_bytes == least.required_bytes
    assert share.raised_budget(100) == (
        "DRAM budget: 25% of this context is 562.5 KiB, which is too little; "
        f"{least.required_bytes / MIB:.1f} MiB is taken, the least that works"
    )
    assert share.raised_budget(8000) is None
    # Bytes mean what they say.
    with pytest.raises(BudgetError, match="raise --dram-budget"):
        needs("1MiB").check(100, ENDLESS)
    assert needs("1MiB").raised_budget(100) is None


def test_forks_count():
    settings = Settings(exact=0.02)
    least = f"{BudgetPlan.with_whole_shadow(SHAPE, settings, 8000).required_bytes}"
    needs(least, settings=settings).check(8000, ENDLESS)
    with pytest.raises(BudgetError):
        needs(least, settings=settings, fork_bytes=1).check(8000, ENDLESS)
    # Where nobody chose how precise tokens are, a little less holds what all exact ones need.
    assert not needs(least, fork_bytes=1).choice(8000).settings.has_coded_tokens
    needs(least, fork_bytes=1).check(8000, ENDLESS)
    assert needs(None, fork_bytes=5 * MIB).footprint(100).budget_bytes == (
        BudgetPlan.with_whole_shadow(SHAPE, Settings(), 100).required_bytes + 5 * MIB
    )


def test_sentences_name_what_is_short_and_the_fix():
    with pytest.raises(FitError) as error:
        needs().check(8000, Capacity(300 * MIB, 1 << 50))
    assert str(error.value) == (
        "a context of 8000 tokens needs 593.9 MiB of memory (weights 500.0 MiB, activations "
        "50.0 MiB, DRAM budget 43.9 MiB) but 300.0 MiB is free; none fits: shorten the prompt, "
        "lower --dram-budget, or close other programs (in Python: dram_budget)"
    )
    with pytest.raises(FitError, match=r"205.1 MiB on the drive of the cold directory but"):
        needs().check(8000, Capacity(1 << 50, 170 * MIB))


def test_gpu_holds_weights_and_the_host_only_the_budget():
    small_host = Capacity(memory_bytes=60 * MIB, drive_bytes=1 << 50, gpu_bytes=600 * MIB)
    needs().check(8000, small_host)
    with pytest.raises(FitError, match=r"550.0 MiB of GPU memory"):
        needs().check(8000, replace(small_host, gpu_bytes=500 * MIB))
    with pytest.raises(FitError, match=r"43.9 MiB of memory \(DRAM budget 43.9 MiB\)"):
        needs().check(8000, replace(small_host, memory_bytes=40 * MIB))
