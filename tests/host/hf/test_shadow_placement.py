# SPDX-License-Identifier: Apache-2.0
"""Which tokens come out does not depend on where the key shadow lies, for each named format."""

from dataclasses import replace

import pytest
import torch
from generation_runs import attached, bits, run
from tiny_models import TinyModel, prompts

from hillinfer.engine.budget_plan import BudgetPlan, kernel_spec
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import SetupWarning
from hillinfer.hf.cache import HillInferCache
from hillinfer.hf.engine import Engine
from hillinfer.kv.pool_policies import POOL_POLICIES
from hillinfer.model_shape import ModelShape
from hillinfer.scoring.native import NativeScorer
from hillinfer.scoring.scorer import SegmentShadow
from hillinfer.settings import Settings
from hillinfer.shadow.store import shadow_bytes
from hillinfer.values import ByteSize

LENGTHS = (2100, 1100)
NEW = 3
SELECTION = {"alpha": 0.1, "kept_recent": 6, "block_rows": 100}
# Full shadows that DRAM has room for; two layers and three full segments want six.
SHADOWS_IN_DRAM = {"dram": 100, "split": 2, "streamed": 0}


@pytest.fixture(scope="module")
def model():
    return TinyModel("llama", "gqa", torch.float32).build()


def go(model, cold_dir, room, given=None, **changes):
    """Return bits and statistics of a batch, and of a fork that goes on after a rewind.

    `given` goes to the runtime.
    """
    ids, mask = prompts(list(LENGTHS))
    with attached(model, cold_dir, **(SELECTION | {"dram_budget": "16MiB"} | changes)) as hill:
        shape = ModelShape.from_config(model.config, model.dtype)
        one = shadow_bytes(kernel_spec(shape, hill.settings))
        given = {"shadow_limit_bytes": room * one} | (given or {})
        cache = HillInferCache(Engine(Runtime(shape, hill.settings, 8 << 20, cold_dir, **given)))
        first = run(model, cache, ids, mask, NEW, prefill_chunk_size=700)
        fork = cache.fork()
        fork.crop(-500)
        again = torch.cat([first.sequences[:, : LENGTHS[0] + NEW - 501], ids[:, -40:]], dim=1)
        longer = torch.cat([mask, mask.new_ones(2, 40)], dim=1)[:, : again.shape[1]]
        second = run(model, fork, again, longer, NEW)
        fork.close()
        statistics = cache.statistics()
        cache.close()
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes
    return (bits(first), bits(second)), statistics


@pytest.mark.parametrize(
    ("shadow", "device"),
    [*((shadow, "nvme") for shadow in ("int8", "int4", "int2")), ("int4", "golden")],
)
def test_dram_split_and_streamed_give_the_same_bits(model, cold_dir, shadow, device):
    found = {
        name: go(model, cold_dir, room, shadow=shadow, device=device)
        for name, room in SHADOWS_IN_DRAM.items()
    }
    (expected, in_dram), (_, split), (_, streamed) = found.values()
    for outputs, _ in found.values():
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert in_dram.shadow_read_bytes == in_dram.shadow_write_bytes == 0
    assert 0 < split.shadow_read_bytes < streamed.shadow_read_bytes
    assert streamed.shadow_bytes < split.shadow_bytes < in_dram.shadow_bytes


@pytest.fixture(scope="module")
def in_dram(model, tmp_path_factory):
    """The bits while all shadows of INT4 are in DRAM."""
    return go(model, tmp_path_factory.mktemp("dram"), 100, shadow="int4")[0]


@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_streamed_with_every_pool_policy(model, in_dram, cold_dir, policy):
    expected, other = in_dram
    (first, second), statistics = go(model, cold_dir, 1, shadow="int4", pool_policy=policy)
    assert torch.equal(first, expected)
    assert torch.equal(second, other)
    assert statistics.shadow_read_bytes > 0


class OtherCodes(NativeScorer):
    """Scores other codes than those that the drive brings."""

    def choose(self, query, scaling, segments, coming, wanted):
        return super().choose(query, scaling, [*map(changed, segments)], coming, wanted)


def changed(segment):
    if not segment.on_drive:
        return segment
    wrong = segment.shadow.copy()
    wrong[:, ::3] ^= 0x77
    return SegmentShadow(segment.base_position, segment.tokens, wrong, segment.statistics)


def test_other_codes_than_those_on_the_drive_change_what_comes_out(model, in_dram, cold_dir):
    """The twin: the shadow that is read from the drive decides."""
    chosen = Settings().changed(**SELECTION, shadow="int4")
    spec = kernel_spec(ModelShape.from_config(model.config, model.dtype), chosen)
    expected, _ = in_dram
    other = {"scorer": OtherCodes(spec, chosen.scope)}
    (found, _), _ = go(model, cold_dir, 0, other, shadow="int4")
    assert not torch.equal(found, expected)
    # Where all shadows are in DRAM none is changed.
    other = {"scorer": OtherCodes(spec, chosen.scope)}
    (found, _), _ = go(model, cold_dir, 100, other, shadow="int4")
    assert torch.equal(found, expected)


def test_a_budget_that_cannot_hold_the_shadow_warns_and_gives_the_same_bits(cold_dir):
    # Large enough that the shadow is more than the buffers of streaming it.
    model = TinyModel("llama", "gqa", torch.float32, layers=6).build()
    ids, _ = prompts([3100])
    shape = ModelShape.from_config(model.config, model.dtype)
    chosen = Settings().changed(**SELECTION, shadow="int8", io_threads=2, kept_sinks=2)
    plan = BudgetPlan.with_whole_shadow(shape, chosen, 3100 + NEW)
    outputs = []
    for budget in (plan.required_bytes, plan.required_bytes - 1):
        with attached(model, cold_dir, **SELECTION, shadow="int8", dram_budget=budget) as hill:
            if budget < plan.required_bytes:
                with pytest.warns(SetupWarning, match="int8 key shadow stay on the drive"):
                    cache = hill.new_cache(expected_tokens=3100 + NEW)
            else:
                cache = hill.new_cache(expected_tokens=3100 + NEW)
            outputs.append(bits(run(model, cache, ids, None, NEW, prefill_chunk_size=512)))
            statistics = cache.statistics()
            assert (statistics.shadow_read_bytes > 0) == (budget < plan.required_bytes)
            assert statistics.dram_peak_bytes <= budget
            cache.close()
    assert torch.equal(*outputs)


def test_a_cache_of_unknown_length_says_when_it_begins_to_stream(model, cold_dir):
    ids, _ = prompts([2300])
    with attached(
        model, cold_dir, **(SELECTION | {"block_rows": 2000}), shadow="int8", dram_budget="4100KiB"
    ) as hill:
        cache = hill.new_cache()
        run(model, cache, ids[:, :600], None, 2)
        with pytest.warns(SetupWarning, match="read from the drive for every new token") as told:
            run(model, hill.new_cache(), ids, None, 2)
        # Whatever else is collected meanwhile may warn, too.
        assert len([one for one in told if issubclass(one.category, SetupWarning)]) == 1
        cache.close()


# Back into the last full segment, and behind it.
@pytest.mark.parametrize("cut", [100, 1500])
def test_the_least_budget_lets_a_streamed_context_be_cut(cold_dir, cut):
    model = TinyModel("llama", "gqa", torch.float32, layers=6).build()
    ids, _ = prompts([3100])
    shape = ModelShape.from_config(model.config, model.dtype)
    chosen = Settings().changed(**SELECTION, shadow="int8", io_threads=2, kept_sinks=2)
    tiny = replace(chosen, dram_budget=ByteSize(byte_count=1))
    least = BudgetPlan.for_context(shape, tiny, 3100 + NEW).required_bytes
    with attached(model, cold_dir, **SELECTION, shadow="int8", dram_budget=least) as hill:
        with pytest.warns(SetupWarning):
            cache = hill.new_cache(expected_tokens=3100 + NEW)
        first = run(model, cache, ids, None, NEW, prefill_chunk_size=512)
        assert cache.statistics().shadow_read_bytes > 0
        cache.crop(-cut)
        again = first.sequences[:, : 3100 + NEW - cut]
        run(model, cache, again, None, NEW, prefill_chunk_size=512)
        cache.close()
