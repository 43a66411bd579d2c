# SPDX-License-Identifier: Apache-2.0
"""What the plan calls the least budget is enough, for any shape and length, and hardly more."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.drive.checksums import ROW_SUM_BYTES
from hillinfer.drive.files import round_up
from hillinfer.engine.budget_plan import (
    BudgetPlan,
    hit_bytes,
    kernel_spec,
    landing_rows,
    score_bytes,
    staging_bytes,
)
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.kv.sequence import observed_bytes
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Encryption, PoolSizes, Settings
from hillinfer.shadow.store import statistics_bytes


@st.composite
def contexts(draw):
    kv_heads = draw(st.integers(1, 4))
    shape = ModelShape(
        layers=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        query_heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([4, 16, 33, 64])),
        stored_type=draw(st.sampled_from(StoredType)),
        max_positions=100_000,
    )
    chosen = Settings().changed(
        alpha=draw(st.sampled_from([0.05, 0.5, 1.0])),
        rule=draw(st.sampled_from(["weight_sum", "raw_sum"])),
        scope=draw(st.sampled_from(["layer", "kv_head"])),
        shadow=draw(st.sampled_from(["int8", "int4", "int2"])),
        kept_recent=draw(st.integers(1, 40)),
        block_rows=draw(st.sampled_from([60, 100, 256])),
        block_tokens=draw(st.sampled_from([1, 64, 1024])),
        io_threads=2,
        pool_policy=draw(st.sampled_from(list(POOL_POLICIES))),
        pool_sizes=draw(st.sampled_from(PoolSizes)),
        encrypt_cold_pool=draw(st.sampled_from([Encryption.YES, Encryption.NO])),
    )
    tokens = draw(st.integers(1, 200) | st.integers(1000, 1100))
    return shape, chosen, tokens, draw(st.integers(1, 3))


def run_through(runtime, tokens, sequences):
    """Read a context in two chunks, fork it, and let every sequence take one step."""
    shape = runtime.shape
    dtype = runtime.layout.stored_type
    generator = torch.Generator().manual_seed(tokens)
    common = max(0, tokens - 1)
    trunk = runtime.open_sequence()
    for start, stop in ((0, common // 2), (common // 2, common)):
        count = stop - start
        if count:
            runtime.begin_step()
        for layer in range(shape.layers if count else 0):
            states = torch.randn(2, shape.kv_heads, count, shape.head_dim, generator=generator).to(
                dtype
            )
            query = torch.randn(shape.query_heads, count, shape.head_dim, generator=generator)
            runtime.append(layer, trunk, *states)
            runtime.attend_dense(layer, trunk, query, *states, 0.3)
    rows = [trunk, *(runtime.fork(trunk) for _ in range(sequences - 1))]
    for sequence in rows:
        runtime.begin_step()
        for layer in range(shape.layers):
            states = torch.randn(2, shape.kv_heads, 1, shape.head_dim, generator=generator)
            query = torch.randn(shape.query_heads, 1, shape.head_dim, generator=generator)
            states = states.to(dtype)
            runtime.append(layer, sequence, *states)
            runtime.attend_selected(layer, sequence, query, states[0], 0.3)


def test_the_least_budget_is_enough(cold_dir):
    @settings(max_examples=20, deadline=None)
    @given(context=contexts(), streams=st.booleans())
    def check(context, streams):
        shape, chosen, tokens, sequences = context
        plan = BudgetPlan.with_whole_shadow(shape, chosen, tokens, sequences)
        spec = kernel_spec(shape, chosen)
        if streams:
            plan = plan.streamed(spec, shape.layers, sequences)
        limit = plan.shadow_limit(spec, shape.layers, sequences)
        runtime = Runtime(shape, chosen, plan.required_bytes, cold_dir, shadow_limit_bytes=limit)
        try:
            run_through(runtime, tokens, sequences)
            statistics = runtime.statistics()
            # Room for the kept rows was left over, whatever the rest took.
            slots = sum(runtime.parts.pools.capacity(layer) for layer in range(shape.layers))
            assert slots >= chosen.kept_tokens * sequences
        finally:
            runtime.close()
        assert statistics.dram_peak_bytes <= plan.required_bytes
        assert statistics.shadow_bytes <= plan.shadow_bytes
        # Buffers to stream through are made when something is streamed.
        assert statistics.staging_bytes <= plan.staging_bytes
        assert statistics.staging_bytes == plan.staging_bytes or streams
        assert statistics.other_bytes <= plan.other_bytes

    check()


def test_much_less_is_refused_on_the_way(cold_dir):
    shape, chosen, tokens = _example()
    plan = BudgetPlan.with_whole_shadow(shape, chosen, tokens)
    runtime = Runtime(shape, chosen, plan.required_bytes - 2 * plan.kept_bytes, cold_dir)
    with pytest.raises(BudgetError, match="raise --dram-budget"):
        run_through(runtime, tokens, 1)
    runtime.close()


def _example():
    shape = ModelShape(
        layers=2,
        kv_heads=2,
        query_heads=4,
        head_dim=16,
        stored_type=StoredType.FLOAT16,
        max_positions=10_000,
    )
    return shape, Settings().changed(exact=1, block_rows=64, dram_budget="64MiB"), 1500


def test_the_check_names_the_parts_and_the_ways_out():
    shape, chosen, tokens = _example()
    plan = BudgetPlan.with_whole_shadow(shape, chosen, tokens)
    plan.check()
    exact = dataclasses.replace(plan, budget_bytes=plan.required_bytes)
    exact.check()
    with pytest.raises(
        BudgetError,
        match=r"too small: this context needs .*shadow .*kept rows .*staging .*other .*"
        r"raise --dram-budget, shrink the shadow .*or lower --block-rows",
    ):
        dataclasses.replace(plan, budget_bytes=plan.required_bytes - 1).check()
    parts = plan.shadow_bytes + plan.kept_bytes + plan.staging_bytes + plan.other_bytes
    assert plan.required_bytes == parts
    assert plan.hot_bytes == plan.budget_bytes - parts + plan.kept_bytes


def test_sizes_that_can_be_worked_out_by_hand():
    shape, chosen, tokens = _example()
    plan = BudgetPlan.with_whole_shadow(shape, chosen, tokens, sequences=3)
    # K and V of 2 heads of 16 channels in 16 bits.
    assert shape.row_bytes == 128
    assert plan.kv_bytes == 1500 * 3 * 2 * 128
    # Per group of 64 and KV head: a beat of exponents, and 64 padded channels of 4 bits.
    group = 2 * (64 + 64 * 64 // 2)
    # In pages, because a shadow may go to the drive; a sixteenth of its tokens is there twice.
    assert plan.shadow_bytes == 2 * 3 * 2 * (round_up(16 * group, 4096) + group)
    assert plan.kept_bytes == 3 * 2 * (36 * (128 + 22) + 64 * 128)
    # Hits take 2 bytes for 2 layers and one that grows, in steps of 1,024 tokens.
    assert hit_bytes(shape, tokens) == 3 * 2 * 2048
    # The paper's policy sees 16 queries of 4 heads of 16 channels in 32 bits, in each layer.
    assert observed_bytes(shape, 16) == 2 * 16 * 4 * 16 * 4
    assert SLOT_BYTES == 22


def test_what_a_policy_observes_is_planned_for_every_sequence():
    shape, chosen, tokens = _example()
    plain = BudgetPlan.with_whole_shadow(shape, chosen, tokens, sequences=3)
    paper = BudgetPlan.with_whole_shadow(
        shape, chosen.changed(pool_policy="paper"), tokens, sequences=3
    )
    assert paper.other_bytes - plain.other_bytes == 3 * observed_bytes(shape, 16)
    assert dataclasses.replace(paper, other_bytes=plain.other_bytes) == plain


def test_hits_are_planned_for_every_sequence_and_token():
    shape, chosen, _ = _example()
    plans = [BudgetPlan.with_whole_shadow(shape, chosen, 2048, sequences=count) for count in (1, 2)]
    longer = BudgetPlan.with_whole_shadow(shape, chosen, 4096, sequences=1)
    hits = hit_bytes(shape, 2048)
    statistics = 2 * 2 * statistics_bytes(kernel_spec(shape, chosen))
    # Slots and checksums of 2,048 rows more, and one layer's slots while they move.
    tables = 2048 * (shape.layers * (4 + ROW_SUM_BYTES) + 4)
    assert plans[1].other_bytes - plans[0].other_bytes == hits + statistics + tables
    scores = [score_bytes(kernel_spec(shape, chosen), chosen.scope, n) for n in (2048, 4096)]
    growth = hits + statistics + tables + scores[1] - scores[0]
    assert longer.other_bytes - plans[0].other_bytes == growth


def test_buffers_follow_from_the_block_size_and_not_from_the_budget():
    shape, chosen, _ = _example()
    expected = staging_bytes(shape, chosen)
    for budget in ("1MiB", "64GiB", "25%"):
        assert staging_bytes(shape, chosen.changed(dram_budget=budget)) == expected
    assert staging_bytes(shape, chosen.changed(block_rows=4096)) > expected


def test_no_more_is_read_ahead_than_the_longest_context_has_exact_tokens_four_times():
    shape, _, _ = _example()
    coded = Settings().changed(alpha=0.2, exact=0.02, encrypt_cold_pool="no")
    small = dataclasses.replace(shape, max_positions=8192)
    # 164 tokens of 8,192, in groups of 64; at most four blocks of 512.
    assert landing_rows(small, coded) == 704
    assert landing_rows(dataclasses.replace(shape, max_positions=131_072), coded) == 2048
    assert landing_rows(small, coded.changed(prefetch_blocks=1)) == 512
    assert landing_rows(small, coded.changed(prefetch_blocks=0)) == 0
    saved = (2048 - 704) * shape.row_bytes
    # Where all tokens are exact, or none has codes in a file, rows are all that comes.
    for other in (coded.changed(exact=1.0), coded.changed(encrypt_cold_pool="yes")):
        assert landing_rows(small, other) == 2048
    large = dataclasses.replace(shape, max_positions=131_072)
    assert staging_bytes(large, coded) - staging_bytes(small, coded) == saved


@pytest.mark.parametrize(("text", "expected"), [("64MiB", 64 << 20), ("25%", 1500 * 2 * 128 // 4)])
def test_a_share_is_of_the_whole_kv_cache(text, expected):
    shape, chosen, tokens = _example()
    plan = BudgetPlan.with_whole_shadow(shape, chosen.changed(dram_budget=text), tokens)
    assert plan.budget_bytes == expected
