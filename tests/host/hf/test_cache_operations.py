# SPDX-License-Identifier: Apache-2.0
"""What transformers and users do to a cache between forward passes."""

import gc
import re
from pathlib import Path

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, RoundedCache, attached, bits, run
from tiny_models import TinyModel, prompts

from hillinfer.errors import BudgetError

TINY = TinyModel()
IDS, _ = prompts([150])
LONG_IDS, _ = prompts([1120])
# A few tokens more fill the group that is open.
NEARLY, _ = prompts([184])
LONG_NEARLY, _ = prompts([1144])


@pytest.fixture
def cold_dir(tmp_path):
    """Its own: other tests' files may be closed at any time."""
    return tmp_path


@torch.no_grad()
def feed(model, cache, ids, chunk=64):
    """Read ids in chunks and return the logits of the last token."""
    for part in torch.split(ids, chunk, dim=1):
        out = model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    return out.logits[:, -1]


def feed_singly(model, cache, ids):
    """Read ids one by one, as in decode, and return the logits of each."""
    return torch.stack([feed(model, cache, ids[:, i : i + 1]) for i in range(ids.shape[1])])


def open_cold_files(cold_dir):
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except OSError:
            continue
    return [link for link in links if link.startswith(str(cold_dir))]


OPERATIONS = {
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "crop some": lambda cache: cache.crop(-7),
    "crop a group": lambda cache: cache.crop(-70),
    "crop nothing": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations_equal_those_of_the_ordinary_cache(operation, cold_dir):
    model = TINY.build()
    ids, _ = prompts([150, 150, 150], seed=3)
    further, _ = prompts([12] * 6, seed=4)
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        reference = RoundedCache(model.config)
        for one in (cache, reference):
            feed(model, one, ids)
            operation(one)
        assert cache.get_seq_length() == reference.get_seq_length()
        batch = reference.layers[0].keys.shape[0]
        found = feed_singly(model, cache, further[:batch])
        expected = feed_singly(model, reference, further[:batch])
        cache.close()
    assert (found - expected).abs().max() <= LOGIT_TOLERANCE[TINY.dtype]


@pytest.mark.parametrize(
    ("alpha", "removed", "budget"),
    [
        (0.15, 1, "24MiB"),
        (0.15, 45, "least"),
        (0.15, 110, "24MiB"),
        (0.15, 110, "least"),
        (1.0, 45, "24MiB"),
        (1.0, 110, "least"),
    ],
)
def test_cropped_tokens_leave_nothing_behind(alpha, removed, budget, cold_dir, least_budget):
    model = TINY.build()
    budget = least_budget(TINY, 400) if budget == "least" else budget
    detour, _ = prompts([removed], seed=8)
    further, _ = prompts([12], seed=9)
    found = []
    with attached(model, cold_dir, alpha=alpha, dram_budget=budget) as hill:
        for winds in (False, True):
            cache = hill.new_cache()
            feed(model, cache, NEARLY)
            # The first step fixes the statistics; a rewind keeps them (contract, section 3).
            feed_singly(model, cache, IDS[:, :1])
            if winds:
                # Read at once or one by one, full groups are cut off, reopened and filled again.
                feed(model, cache, detour, 90)
                cache.crop(-removed)
            found.append(feed_singly(model, cache, further))
            cache.close()
    assert torch.equal(*found)


def test_cropping_into_an_earlier_segment(cold_dir):
    model = TINY.build()
    further, _ = prompts([5], seed=9)
    with attached(model, cold_dir, alpha=0.1) as hill:
        straight, winding = hill.new_cache(), hill.new_cache()
        feed(model, straight, LONG_IDS[:, :1024], 256)
        feed(model, winding, LONG_IDS, 256)
        feed_singly(model, winding, LONG_IDS[:, :3])
        winding.crop(-99)
        assert winding.get_seq_length() == 1024
        assert torch.equal(
            feed_singly(model, winding, further), feed_singly(model, straight, further)
        )
        straight.close()
        winding.close()


def test_cropping_everything_and_more(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        cache, fresh = hill.new_cache(), hill.new_cache()
        feed(model, cache, IDS)
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        other, _ = prompts([150], seed=2)
        assert torch.equal(bits(run(model, cache, other)), bits(run(model, fresh, other)))
        cache.close()
        fresh.close()


def test_crop_takes_no_positive_count(cold_dir):
    with attached(TINY.build(), cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(ValueError, match="negative number of tokens to remove"):
            cache.crop(3)
        cache.close()


def test_cropping_a_padded_batch(cold_dir):
    model = TINY.build()
    ids, mask = prompts([100, 30])
    question, _ = prompts([20, 20], seed=3)
    with attached(model, cold_dir, alpha=1.0) as hill, torch.no_grad():
        straight, winding = hill.new_cache(), hill.new_cache()
        for cache in (straight, winding):
            model(ids, attention_mask=mask, past_key_values=cache)
        detour_mask = torch.cat([mask, mask.new_ones(2, 60)], dim=1)
        model(ids[:, :60].flip(1), attention_mask=detour_mask, past_key_values=winding)
        winding.crop(-60)
        longer = torch.cat([mask, mask.new_ones(2, 20)], dim=1)
        outputs = [
            model(question, attention_mask=longer, past_key_values=cache).logits
            for cache in (straight, winding)
        ]
        straight.close()
        winding.close()
    assert torch.equal(*outputs)


def test_a_crop_that_reaches_into_padding_cuts_it(cold_dir):
    model = TINY.build()
    ids, mask = prompts([100, 30])
    question, _ = prompts([20, 20], seed=3)
    # Of the second row nothing is left but padding, and less of it.
    talk = torch.cat([ids[:, :50], question], dim=1)
    longer = torch.cat([mask[:, :50], mask.new_ones(2, 20)], dim=1)
    with attached(model, cold_dir) as hill, torch.no_grad():
        straight, winding = hill.new_cache(), hill.new_cache()
        for cache in (straight, winding):
            model(ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
        model(ids[:, 50:], attention_mask=mask, past_key_values=winding)
        winding.crop(-50)
        outputs = [bits(run(model, cache, talk, longer)) for cache in (straight, winding)]
        straight.close()
        winding.close()
    assert torch.equal(*outputs)


def test_a_reset_cache_is_a_new_one_and_reuses_its_space(cold_dir):
    model = TINY.build()
    other, _ = prompts([150, 150], seed=2)
    with attached(model, cold_dir) as hill:
        cache, fresh = hill.new_cache(), hill.new_cache()
        run(model, cache, IDS)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.statistics().kv_bytes == 0
        assert torch.equal(bits(run(model, cache, other)), bits(run(model, fresh, other)))
        assert cache.statistics().kv_bytes == fresh.statistics().kv_bytes
        cache.close()
        fresh.close()


@pytest.mark.parametrize(
    ("ids", "before"),
    [(NEARLY, 0), (NEARLY, 2), (LONG_NEARLY, 2)],
    ids=["after prefill", "after decode", "in the second segment"],
)
def test_forks_go_their_own_ways(ids, before, cold_dir):
    model = TINY.build()
    # Enough to fill the group that is open when they part.
    ways = [prompts([12], seed)[0] for seed in (5, 6)]
    beginning, _ = prompts([3], seed=7)

    def prefilled():
        cache = hill.new_cache()
        feed(model, cache, ids, 256)
        if before:
            feed_singly(model, cache, beginning[:, :before])
        return cache

    with attached(model, cold_dir) as hill:
        expected = []
        for way in ways:
            cache = prefilled()
            expected.append(feed_singly(model, cache, way))
            cache.close()
        trunk = prefilled()
        written = trunk.statistics().cold_write_bytes
        branch = trunk.fork()
        assert trunk.statistics().cold_write_bytes == written
        # Step by step in turn, so that each could disturb the other.
        found = [
            torch.stack(rows)
            for rows in zip(
                *(
                    (
                        feed(model, trunk, ways[0][:, i : i + 1]),
                        feed(model, branch, ways[1][:, i : i + 1]),
                    )
                    for i in range(12)
                ),
                strict=True,
            )
        ]
        trunk.close()
        branch.close()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], found[1])


def test_a_fork_outlives_its_origin(cold_dir):
    model = TINY.build()
    further, _ = prompts([12], seed=5)
    before = len(open_cold_files(cold_dir))
    with attached(model, cold_dir) as hill:
        trunk = hill.new_cache()
        feed(model, trunk, NEARLY)
        branch = trunk.fork()
        twig = branch.fork()
        expected = feed_singly(model, trunk, further)
        trunk.close()
        branch.close()
        assert torch.equal(feed_singly(model, twig, further), expected)
        twig.close()
    assert len(open_cold_files(cold_dir)) == before


def test_dropping_a_cache_is_closing_it(cold_dir):
    model = TINY.build()
    gc.collect()
    before = len(open_cold_files(cold_dir))
    gc.disable()
    try:
        with attached(model, cold_dir) as hill:
            cache = hill.new_cache()
            feed(model, cache, IDS)
            feed_singly(model, cache, IDS[:, :2])
            assert len(open_cold_files(cold_dir)) == before + TINY.layers
            runtime = cache.engine.runtime
            held = runtime.parts.accountant.held()
            for _ in range(3):
                fork = cache.fork()
                feed(model, fork, IDS[:, :70])
                feed_singly(model, fork, IDS[:, :2])
                del fork
            # A dropped fork is freed when another is used.
            cache.crop(0)
            assert runtime.parts.accountant.held()["hot"] - held["hot"] < 200 * 2 * 64
            assert runtime.parts.accountant.held()["shadow"] <= held["shadow"]
            assert runtime.parts.groups.parts_in_use == 2
            del cache
            assert len(open_cold_files(cold_dir)) == before
    finally:
        gc.enable()


@torch.no_grad()
def test_a_fork_of_a_batch_that_the_budget_refuses_keeps_none_of_its_rows(cold_dir):
    """Rows of the batch that there was room for are given back."""
    model = TinyModel(heads="mha", head_dim=64, layers=4).build()
    ids, refusals = prompts([150, 150, 150])[0], set()
    # So that now no row of the last fork has room, and now the first one or two of them have.
    for budget in range(8200, 8900, 80):
        with attached(model, cold_dir, dram_budget=f"{budget}KiB") as hill:
            cache, forks = hill.new_cache(), []
            model(ids, past_key_values=cache, logits_to_keep=1)
            with pytest.raises(BudgetError, match="sequences share it") as told:
                forks.extend(iter(cache.fork, None))
            whole, known = hill.statistics(), cache.statistics()
            for one in [*forks, cache]:
                one.close()
        assert whole.kv_bytes == known.kv_bytes
        rows = int(re.search(r"(\d+) sequences share", str(told.value))[1])
        refusals.add(rows - len(ids) * (len(forks) + 1))
    assert refusals == {0, 1, 2}


@torch.no_grad()
def test_queries_that_are_observed_do_not_keep_those_of_their_chunk(cold_dir):
    """Until the first step the policy has the last 16 of each layer, and nothing beside them."""
    model = TINY.build()
    with attached(model, cold_dir, pool_policy="paper") as hill:
        cache = hill.new_cache()
        model(prompts([512])[0], past_key_values=cache, logits_to_keep=1)
        (sequence,) = cache.sequences
        assert [len(one) for one in sequence.observed] == [16] * TINY.layers
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in sequence.observed)
        cache.close()
