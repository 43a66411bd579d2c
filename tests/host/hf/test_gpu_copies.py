# SPDX-License-Identifier: Apache-2.0
"""Whole generations whose copies a lane does, beside the same without one."""

from functools import partial

import pytest
import torch
from copy_lanes import FailingLane, LateLane
from generation_runs import CODED, MORE_EXACT, attached_with, bits, run
from tiny_models import TinyModel, prompts

# So many new tokens that groups of 64 fill and open.
NEW_TOKENS = 6
LENGTHS = {"one": [189], "padded batch": [189, 124, 61]}


@pytest.fixture
def on_lane(monkeypatch):
    """Return what attaches so that caches copy by a lane."""

    def use(lane, model, cold_dir, **changes):
        if lane is None:
            # Selected rows in one block by torch, as the lane's side computes.
            monkeypatch.setattr("hillinfer.engine.opening.host_attention", lambda shape: None)

        return attached_with(model, cold_dir, {"make_lane": lambda devices: lane}, **changes)

    return use


def generate(attach, tiny, cold_dir, lengths, **changes):
    ids, mask = prompts(lengths)
    with attach(tiny.build(), cold_dir, **changes) as hill:
        cache = hill.new_cache()
        output = run(hill.model, cache, ids, mask, NEW_TOKENS)
        statistics = cache.statistics()
        cache.close()
    return bits(output), statistics


BF16 = TinyModel(dtype=torch.bfloat16, layers=4)


def crossed(one, other):
    """Return cases in which any two of model, query and lengths meet."""
    return [
        *((one, "true", "one"), (one, "predicted", "padded batch")),
        *((other, "predicted", "one"), (other, "true", "padded batch")),
    ]


@pytest.mark.parametrize(
    ("tiny", "query", "lengths"), crossed(BF16, TinyModel("opt", "mha", layers=4)), ids=str
)
def test_a_generation_is_the_same_with_late_copies(
    tiny, query, lengths, cold_dir, least_budget, on_lane
):
    lengths = LENGTHS[lengths]
    least = least_budget(tiny, max(lengths) + NEW_TOKENS, len(lengths)) + (64 << 10)
    late = partial(on_lane, LateLane([0, 0.001], [0.002, 0]))
    found, statistics = generate(late, tiny, cold_dir, lengths, query=query, dram_budget=least)
    expected, _ = generate(partial(on_lane, None), tiny, cold_dir, lengths, query=query)
    assert torch.equal(found, expected)
    assert statistics.gpu_staging == "pinned"
    assert statistics.host_to_device_bytes > 0
    assert statistics.dram_peak_bytes <= statistics.dram_budget_bytes


@pytest.mark.parametrize(("tiny", "query", "lengths"), crossed(BF16, TinyModel()), ids=str)
def test_coded_tokens_are_the_same_with_late_copies(tiny, query, lengths, cold_dir, on_lane):
    """Without a lane the native library attends, with one torch does: section 16 fixes both."""
    lengths = LENGTHS[lengths]
    coded = CODED | {"query": query}
    found, statistics = generate(
        partial(on_lane, LateLane([0, 0.001], [0.002, 0])), tiny, cold_dir, lengths, **coded
    )

    def on_processor(model, cold_dir, **changes):
        return attached_with(model, cold_dir, {}, **changes)

    expected, here = generate(on_processor, tiny, cold_dir, lengths, **coded)
    assert torch.equal(found, expected)
    assert statistics.coded_tokens == here.coded_tokens > 0
    assert statistics.host_to_device_bytes > 0
    others, _ = generate(on_processor, tiny, cold_dir, lengths, **coded | MORE_EXACT)
    assert not torch.equal(others, expected)


def test_what_the_test_on_a_gpu_changes_changes_bits_at_its_length(cold_dir):
    """A floor below the share changes nothing, so that test's twin needs one above it."""
    outputs = []
    for changes in ({}, {"exact_floor": 11}, MORE_EXACT):
        tiny = TinyModel(layers=4)
        model = tiny.build()
        with attached_with(model, cold_dir, {}, **CODED | changes) as hill:
            cache = hill.new_cache()
            outputs.append(bits(run(model, cache, prompts([250])[0])))
            cache.close()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_forward_pass_in_inference_mode_copies_too(cold_dir, on_lane):
    outputs = []
    for lane, mode in ((LateLane([0.001]), torch.inference_mode), (None, torch.no_grad)):
        model = TinyModel(layers=4).build()
        with on_lane(lane, model, cold_dir, query="predicted") as hill, mode():
            cache = hill.new_cache()
            model(prompts([150])[0], past_key_values=cache)
            tokens = torch.arange(1, 4)[:, None, None]
            outputs.append([model(token, past_key_values=cache).logits + 0 for token in tokens])
            cache.close()
    assert all(map(torch.equal, *outputs))


def test_forks_crops_and_second_turns_find_their_rows(cold_dir, on_lane):
    tiny, logits = TinyModel(layers=4), []
    for lane in (LateLane([0.001], [0.004]), None):
        model = tiny.build()
        ids, _ = prompts([150])
        with on_lane(lane, model, cold_dir, query="predicted") as hill, torch.no_grad():
            cache = hill.new_cache()
            out = model(ids, past_key_values=cache)
            found = []
            for turn in range(3):
                for _ in range(3):
                    out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache)
                    found.append(out.logits[:, -1])
                fork = cache.fork()
                found.append(model(torch.tensor([[turn + 3]]), past_key_values=fork).logits[:, -1])
                fork.crop(-2)
                found.append(model(torch.tensor([[turn + 9]]), past_key_values=fork).logits[:, -1])
                fork.close()
                out = model(prompts([40], seed=turn + 1)[0], past_key_values=cache)
                found.append(out.logits[:, -1])
            cache.close()
        logits.append(torch.cat(found))
    assert torch.equal(logits[0].view(torch.int32), logits[1].view(torch.int32))


def test_a_forward_pass_that_breaks_off_leaves_the_cache_as_it_was(cold_dir, on_lane):
    lane = FailingLane([0.001], [0.003])
    model = TinyModel(layers=4).build()
    ids, _ = prompts([150])
    token = torch.tensor([[5]])
    with on_lane(lane, model, cold_dir, query="predicted") as hill, torch.no_grad():
        cache = hill.new_cache()
        model(ids, past_key_values=cache)
        expected = model(token, past_key_values=cache.fork()).logits
        lane.broken = True
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(token, past_key_values=cache)
        lane.broken = False
        assert torch.equal(model(token, past_key_values=cache).logits, expected)
        cache.close()
