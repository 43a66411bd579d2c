# SPDX-License-Identifier: Apache-2.0
"""Whole blocks that decoded tokens attend to in caches on a drive, beside plain torch."""

from collections import Counter, defaultdict
from contextlib import contextmanager

import pytest
import torch
from copy_lanes import LateLane
from generation_runs import attached_with
from test_bands import attached
from test_decoding import DECIDE, FED, LAST, WINDOW, feed, plain_of, read, timeless, watched
from test_reading import IDS, TINY, TOKENS, StruckError, lengths
from tiny_models import FAMILIES, TinyModel

import hillinfer
from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.pruning.blocks.policies import make_decoding
from hillinfer.pruning.caches import CacheOnDrive

# 11 blocks, of which the cut keeps 6, and a token attends to 4 in the layers behind it.
CUT, BAND, COUNT = "2:50%", range(2, 5), 4
NAME = "blocks:40%"


@contextmanager
def opened(model, cold_dir, decoding=NAME, ranker="paper", cut=CUT, **settings):
    with (
        attached(model, cold_dir, **settings) as hill,
        hillinfer.prune(model, cut, ranker=ranker, decoding=decoding) as pruning,
    ):
        yield hill, pruning


@torch.no_grad()
def held(model, hill):
    cache = hill.new_cache(expected_tokens=1000)
    model(IDS, past_key_values=cache, logits_to_keep=1)
    return cache


def observed(cache):
    """Return the sets that layers attend to from now on, by layer and length."""
    found = defaultdict(list)
    cache.engine.runtime.observe_selected = lambda layer, length, sets: found[layer, length].append(
        [one.tolist() for one in sets]
    )
    return found


@pytest.mark.parametrize(
    ("family", "gamma"), [*((family, 0.9) for family in FAMILIES), ("llama", 0.7)]
)
def test_layers_attend_to_blocks_that_the_rule_wants(family, gamma, cold_dir):
    """Rank by the last queries, and change once too few of what is wanted is attended to."""
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    plain, tally, query = plain_of(model), Counter(), "auto" if gamma == 0.9 else "true"
    with opened(model, cold_dir, f"{NAME}:{gamma}", alpha=0.3, query=query) as (hill, pruning):
        cache = held(model, hill)
        kept, prompt = pruning.read_of(cache).kept[0], torch.arange(TOKENS)
        stays = torch.isin(prompt // 64, kept)
        entered, sets, had = watched(model, plain), observed(cache), None
        for step, token in enumerate(FED[0]):
            feed(model, cache, token.view(1, 1))
            length = TOKENS + step + 1
            (active,) = pruning.decoding_of(cache).active
            band = torch.cat([prompt[stays], torch.arange(TOKENS, length)])
            expected = (torch.isin(band // 64, torch.tensor(active)) | (band >= TOKENS)).nonzero()
            for layer in BAND:
                assert sets[layer, len(band)] == [[expected.flatten().tolist()]]
            if step >= WINDOW:
                with CacheOnDrive(cache).keys(DECIDE[0]) as keys:
                    wanted = plain.candidates(
                        0,
                        torch.cat(entered[DECIDE[0]][-WINDOW:], 1),
                        keys[:, band].float(),
                        band,
                        COUNT,
                        length,
                    )
                moves = len(wanted & had) / len(wanted) < gamma
                assert set(active) == (wanted if moves else had)
                tally["moves" if moves else "differs" if wanted != had else "same"] += 1
            had = set(active)
        told = pruning.decoding_of(cache)
        assert told.steps == FED.shape[1]
        assert {0, LAST} <= had <= set(kept.tolist())
    assert tally["moves"] > 0
    assert tally["same"] + tally["differs"] > 0
    assert told.swaps[0] >= tally["moves"]
    assert told.entered_rows == 64 * told.put_back * len(BAND)


def test_bits_are_the_same_wherever_rows_lie(cold_dir):
    model, found = TINY.build(), []
    cases = [
        {"dram_budget": "40%"},
        {"dram_budget": "120%"},
        {"dram_budget": "120%", "query": "true"},
        {"dram_budget": "40%", "query": "true"},
    ]
    for settings in cases:
        with opened(model, cold_dir, cut="2:50%,4:25%", alpha=1.0, **settings) as (hill, pruning):
            cache = held(model, hill)
            logits = feed(model, cache, FED)
            found.append((logits, timeless(pruning.decoding_of(cache))))
    for logits, told in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert told == found[0][1]
    # The twin: other blocks are other bits.
    with opened(model, cold_dir, "blocks:20%", cut="2:50%,4:25%", alpha=1.0) as (hill, _):
        assert not torch.equal(feed(model, held(model, hill), FED), found[0][0])


def test_a_gpu_is_sent_rows_once_it_is_told_which(cold_dir):
    """What a token before was told would be copied in vain."""
    model, logits = TINY.build(), []
    for query in ("true", "predicted"):
        given = {"make_lane": lambda devices: LateLane()}
        with (
            attached_with(model, cold_dir, given, alpha=0.3, query=query) as hill,
            hillinfer.prune(model, CUT, decoding=NAME),
        ):
            cache, announced = held(model, hill), []
            announce = cache.engine.runtime.announce

            def noted(layer, sequence, *rest, announce=announce, announced=announced):
                announced.append(sequence.told)
                announce(layer, sequence, *rest)

            cache.engine.runtime.announce = noted
            logits.append(feed(model, cache, FED[:, :4]))
            # Before the first token nobody was told.
            assert bool(announced) == (query == "predicted")
            assert all(one is None for one in announced)
    assert torch.equal(*logits)


def test_all_blocks_are_what_selecting_all_attends_to(cold_dir):
    model, logits = TINY.build(), {}
    for decoding in ("keep", "blocks:99%", "blocks:20%"):
        with opened(model, cold_dir, decoding, alpha=1.0) as (hill, _):
            logits[decoding] = feed(model, held(model, hill), FED)
    torch.testing.assert_close(logits["blocks:99%"], logits["keep"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits["blocks:20%"], logits["keep"], atol=1e-3)


@pytest.mark.parametrize("query", ["true", "predicted"])
def test_forks_cropped_answers_and_broken_steps_go_on_alike(query, cold_dir):
    model = TINY.build()

    def strike(*given):
        raise StruckError

    with opened(model, cold_dir, alpha=0.3, query=query) as (hill, pruning):
        cache = held(model, hill)
        fork, broken = cache.fork(), cache.fork()
        expected = feed(model, cache, FED)
        assert torch.equal(feed(model, fork, FED), expected)
        for layer in (1, 2, 4):
            hook = model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(
                strike
            )
            with pytest.raises(StruckError):
                feed(model, broken, FED[:, :1])
            hook.remove()
        assert torch.equal(feed(model, broken, FED[:, :20]), expected[:20])
        half = broken.fork()
        assert torch.equal(feed(model, half, FED[:, 20:]), expected[20:])
        assert timeless(pruning.decoding_of(half)) == timeless(pruning.decoding_of(cache))
        cache.crop(-FED.shape[1])
        assert torch.equal(feed(model, cache, FED), expected)


def test_what_goes_on_without_pruning_selects_as_ever(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir, alpha=0.3) as hill:
        with hillinfer.prune(model, CUT, decoding=NAME):
            cache = held(model, hill)
            feed(model, cache, FED[:, :5])
        with hillinfer.prune(model, CUT):
            other = held(model, hill)
            feed(model, other, FED[:, :5])
        sets = observed(cache)
        feed(model, cache, FED[:, 5:10])
        assert lengths(cache) == [one + 5 for one in lengths(other)]
        # As many as a share of the context, not whole blocks.
        assert {len(one[0][0]) for (layer, _), one in sets.items() if layer in BAND} == {
            len(one[0][0]) for (layer, _), one in sets.items() if layer not in BAND
        }


def test_what_blocks_are_not_for_is_refused(cold_dir):
    model = TINY.build()
    with (
        hillinfer.prune(model, CUT, decoding=NAME) as pruning,
        pytest.raises(UnsupportedFeatureError, match='take decoding="swap", which moves them'),
    ):
        read(model, pruning)
    for text in ("blocks", "blocks:half", "blocks:10%:0.9:1"):
        with pytest.raises(SettingsError, match="choose one of keep, swap, blocks"):
            make_decoding(text)
    for text in ("blocks:0%", "blocks:100%", "blocks:2"):
        with pytest.raises(SettingsError, match="above 0 and below 1"):
            make_decoding(text)
    assert make_decoding("blocks:25%").share == 0.25
    assert make_decoding("swap").share is None
