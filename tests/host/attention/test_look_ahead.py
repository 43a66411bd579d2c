# SPDX-License-Identifier: Apache-2.0
"""While a layer's MLP computes, the first rows of the next layer are read; no bit depends on it."""

import time

import pytest
import torch
from generation_runs import attached, bits, run
from tiny_models import TinyModel, prompts
from trace_events import ends, load, spans

LENGTH, NEW, LAYERS = 700, 3, 3
TINY = TinyModel("llama", "gqa", torch.float32, head_dim=64, layers=LAYERS)
CHANGES = {"shadow": "int4", "kept_recent": 6, "block_rows": 48}


@pytest.fixture(scope="module")
def model():
    return TINY.build()


@pytest.fixture(scope="module")
def least(least_budget):
    """A budget that leaves rows next to nothing, so that they come from the drive."""
    return least_budget(TINY, LENGTH + NEW, **CHANGES)


def generated(model, cold_dir, budget, trace=None, lengths=(LENGTH,), **changes):
    ids, mask = prompts(list(lengths))
    changes = CHANGES | {"dram_budget": budget, "trace": trace} | changes
    with attached(model, cold_dir, **changes) as hill:
        cache = hill.new_cache(LENGTH + NEW, len(lengths))
        output = run(model, cache, ids, mask, NEW, prefill_chunk_size=300)
        statistics = cache.statistics()
        cache.close()
    return bits(output), statistics


def read_early(file):
    """Return which layers' rows were read before their attention, in passes of several tokens."""
    events = load(file)
    passes = {
        one["args"]["step"] for one in spans(events, "steps", "step") if one["args"]["tokens"] > 1
    }
    began = {
        (one["args"]["step"], one["args"]["layer"]): ends(one)[0]
        for one in spans(events, "steps", "attend")
    }
    early = set()
    for one in spans(events, "reads", "rows"):
        place = one["args"]["step"], one["args"]["layer"]
        if place[0] in passes and ends(one)[0] < began[place]:
            early.add(place[1])
    return early


@pytest.fixture
def slow(model):
    """Layers whose MLP takes long enough for a thread to begin a read."""
    hooks = [
        layer.mlp.register_forward_hook(lambda *_: time.sleep(0.03)) for layer in model.model.layers
    ]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.usefixtures("slow")
def test_rows_of_the_next_layer_come_while_the_one_before_computes(
    model, cold_dir, least, tmp_path
):
    found, statistics = generated(model, cold_dir, least, tmp_path / "ahead.json")
    assert read_early(tmp_path / "ahead.json") == set(range(1, LAYERS))
    # Without room to land in, nothing comes early, and the bits are the same.
    others, without = generated(model, cold_dir, least, tmp_path / "none.json", prefetch_blocks=0)
    assert read_early(tmp_path / "none.json") == set()
    assert torch.equal(found, others)
    assert statistics.cold_useful_bytes >= without.cold_useful_bytes > 0
    # The twin.
    assert not torch.equal(found, generated(model, cold_dir, least, alpha=0.05)[0])


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("blocks", [1, 2])
def test_behind_rows_that_stay_hot_no_more_is_looked_at_than_eight_times_what_lands(
    model, cold_dir, least_budget, tmp_path, blocks
):
    """FP16 rows suit kernels, and what tells these where rows lie must not change how many land."""
    # The first tokens are kept, so they are hot. They are all that is looked at for a block of 16
    # rows, and half of it for two.
    changes = CHANGES | {"kept_sinks": 128, "block_rows": 16, "prefetch_blocks": blocks}
    budget = least_budget(TINY, LENGTH + NEW, **changes)
    _, statistics = generated(model, cold_dir, budget, tmp_path / "ahead.json", **changes)
    assert statistics.cold_useful_bytes > 0
    early = read_early(tmp_path / "ahead.json")
    assert early == (set() if blocks == 1 else set(range(1, LAYERS)))


def test_several_rows_of_a_batch_look_ahead_each(model, cold_dir, least, tmp_path):
    lengths = (LENGTH, 450)
    found, _ = generated(model, cold_dir, "4MiB", None, lengths)
    others, _ = generated(model, cold_dir, "4MiB", tmp_path / "t.json", lengths, prefetch_blocks=0)
    assert torch.equal(found, others)


def test_no_row_of_a_batch_gives_up_what_was_read_ahead_for_another(model, cold_dir):
    ids = torch.cat([prompts([1536], seed=seed)[0] for seed in (1, 2)])
    with attached(model, cold_dir, **CHANGES, dram_budget="3MiB") as hill, torch.no_grad():
        cache = hill.new_cache(len(ids[0]), len(ids))
        for chunk in ids.split(512, dim=1):
            model(chunk, past_key_values=cache)
            # Attention took all of it, so no row is read again.
            assert not cache.engine.runtime.prefetch.unclaimed
        assert cache.statistics().cold_reads
        cache.close()


def test_what_was_read_ahead_of_a_pass_that_broke_off_is_given_up(model, cold_dir, least):
    ids, _ = prompts([LENGTH])

    def broken(*_):
        raise RuntimeError("broke off")

    with attached(model, cold_dir, **CHANGES, dram_budget=least) as hill, torch.no_grad():
        expected = hill.new_cache(LENGTH + NEW)
        plain = run(model, expected, ids, None, NEW, prefill_chunk_size=300)
        expected.close()
        cache = hill.new_cache(LENGTH + NEW)
        model(ids[:, :400], past_key_values=cache)
        hook = model.model.layers[1].mlp.register_forward_hook(broken)
        with pytest.raises(RuntimeError, match="broke off"):
            model(ids[:, 400:600], past_key_values=cache)
        hook.remove()
        cache.crop(-cache.get_seq_length())
        again = run(model, cache, ids, None, NEW, prefill_chunk_size=300)
        assert torch.equal(bits(again), bits(plain))
