# SPDX-License-Identifier: Apache-2.0
"""Whole blocks that decoded tokens attend to in caches on a drive, beside plain torch."""

import errno
import sys
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from copy_lanes import LateLane
from generation_runs import attached_with
from test_bands import Failing, attached
from test_decoding import DECIDE, FED, LAST, WINDOW, feed, plain_of, read, timeless, watched
from test_reading import IDS, TINY, TOKENS, StruckError, lengths
from tiny_models import TinyModel
from waiting import until

import hillinfer
from hillinfer.engine.runtime import Runtime
from hillinfer.errors import (
    CacheUseError,
    ColdPoolError,
    SessionError,
    SettingsError,
    UnsupportedFeatureError,
)
from hillinfer.hf.attach import Attachment
from hillinfer.pruning.block_policies import make_decoding
from hillinfer.pruning.caches import CacheOnDrive

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from single_reads import SingleReads

# 11 blocks, of which the cut keeps 6, and a token attends to 4 in the layers behind it.
CUT, BAND, COUNT = "2:50%", range(2, 5), 4
NAME, ENTER = "blocks:40%", "enter:40%"
# Decoded tokens within which blocks move, and the group that a prompt left open ends.
STEPS = 12


@contextmanager
def opened(model, cold_dir, decoding=NAME, ranker="paper", cut=CUT, sets=None, **settings):
    with (
        observed(model, cold_dir, sets, **settings) as hill,
        hillinfer.prune(model, cut, ranker=ranker, decoding=decoding) as pruning,
    ):
        yield hill, pruning


@torch.no_grad()
def held(model, hill):
    cache = hill.new_cache(expected_tokens=1000)
    model(IDS, past_key_values=cache, logits_to_keep=1)
    return cache


def observed(model, cold_dir, sets, **settings):
    """Attach, and note the sets that layers attend to by layer and length, where that is given."""

    def note(layer, length, chosen):
        if sets is not None:
            sets[layer, length].append([one.tolist() for one in chosen])

    given = {"open_runtime": partial(Runtime, observe_selected=note)}
    settings = {"alpha": 0.2, "dram_budget": "60%"} | settings
    chosen = hillinfer.Settings().changed(cold_dir=cold_dir, **settings)
    return Attachment(model, chosen, **given)


@pytest.mark.parametrize(
    ("name", "family", "gamma"),
    [
        *((NAME, family, 0.9) for family in ("qwen2", "qwen3", "opt")),
        (NAME, "llama", 0.7),
        (ENTER, "llama", 0.7),
        (ENTER, "opt", 0.9),
    ],
)
def test_layers_attend_to_blocks_that_the_rule_wants(name, family, gamma, cold_dir):
    """Rank by the last queries, and change once too few of what is wanted is attended to."""
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    plain, tally, query = plain_of(model), Counter(), "auto" if gamma == 0.9 else "true"
    sets, rule = defaultdict(list), f"{name}:{gamma}"
    with opened(model, cold_dir, rule, sets=sets, alpha=0.3, query=query) as (hill, pruning):
        cache = held(model, hill)
        sets.clear()
        kept, prompt = pruning.read_of(cache).kept[0], torch.arange(TOKENS)
        stays = torch.isin(prompt // 64, kept)
        among = prompt[stays] if name == NAME else prompt
        entered, had, band = watched(model, plain), None, prompt[stays]
        for step, token in enumerate(FED[0, :28]):
            feed(model, cache, token.view(1, 1))
            length = TOKENS + step + 1
            (active,) = pruning.decoding_of(cache).active
            # What enters lies before the token that it enters for.
            fresh = sorted({*active} - {*(band // 64).tolist()})
            places = [torch.arange(64 * one, 64 * one + 64) for one in fresh]
            band = torch.cat([band, *places, torch.tensor([length - 1])])
            tally["computed"] += len(fresh)
            expected = (torch.isin(band // 64, torch.tensor(active)) | (band >= TOKENS)).nonzero()
            for layer in BAND:
                assert sets[layer, len(band)] == [[expected.flatten().tolist()]]
            if step >= WINDOW:
                with CacheOnDrive(cache).keys(DECIDE[0]) as keys:
                    places = torch.cat([among, torch.arange(TOKENS, length)])
                    wanted = plain.candidates(
                        0,
                        torch.cat(entered[DECIDE[0]][-WINDOW:], 1),
                        keys[:, places].float(),
                        places,
                        COUNT,
                        length,
                    )
                moves = len(wanted & had) / len(wanted) < gamma
                assert set(active) == (wanted if moves else had)
                tally["moves" if moves else "differs" if wanted != had else "same"] += 1
            had = set(active)
        told = pruning.decoding_of(cache)
        assert told.steps == 28
        assert {0, LAST} <= had <= {*(among // 64).tolist()}
    assert tally["moves"] > 0
    assert tally["same"] + tally["differs"] > 0
    assert told.swaps[0] >= tally["moves"]
    assert told.computed == tally["computed"]
    assert (told.computed > 0) == (name == ENTER)
    assert told.entered_rows == 64 * (told.computed + told.put_back) * len(BAND)


@pytest.mark.parametrize(
    ("name", "other", "cut"),
    [(NAME, "blocks:20%", "2:50%,4:25%"), (ENTER, "enter:20%", CUT)],
)
def test_bits_are_the_same_wherever_rows_lie(name, other, cut, cold_dir):
    model, found = TINY.build(), []
    cases = [
        {"dram_budget": "40%"},
        {"dram_budget": "120%"},
        {"dram_budget": "40%", "query": "true"},
    ]
    for settings in cases:
        with opened(model, cold_dir, name, cut=cut, alpha=1.0, **settings) as (hill, pruning):
            cache = held(model, hill)
            logits = feed(model, cache, FED[:, :STEPS])
            found.append((logits, timeless(pruning.decoding_of(cache))))
            assert sum(found[-1][1].swaps) > 0
    for logits, told in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert told == found[0][1]
    # The twin: other blocks are other bits.
    with opened(model, cold_dir, other, cut=cut, alpha=1.0) as (hill, _):
        assert not torch.equal(feed(model, held(model, hill), FED[:, :STEPS]), found[0][0])


class Noting(Runtime):
    """Notes what a sequence was told when a layer is announced for it."""

    def __init__(self, announced, *given, **named):
        super().__init__(*given, **named)
        self._announced = announced

    def announce(self, layer, sequence, *rest):
        self._announced.append(sequence.told)
        super().announce(layer, sequence, *rest)


def test_a_gpu_is_sent_rows_once_it_is_told_which(cold_dir):
    """What a token before was told would be copied in vain."""
    model, logits = TINY.build(), []
    for query in ("true", "predicted"):
        announced = []
        given = {
            "make_lane": lambda devices: LateLane(),
            "open_runtime": partial(Noting, announced),
        }
        with (
            attached_with(model, cold_dir, given, alpha=0.3, query=query) as hill,
            hillinfer.prune(model, CUT, decoding=NAME),
        ):
            cache = held(model, hill)
            announced.clear()
            logits.append(feed(model, cache, FED[:, :4]))
            # Before the first token nobody was told.
            assert bool(announced) == (query == "predicted")
            assert all(one is None for one in announced)
    assert torch.equal(*logits)


def test_all_blocks_are_what_selecting_all_attends_to(cold_dir):
    model, logits = TINY.build(), {}
    for decoding in ("keep", "blocks:99%", "blocks:20%"):
        with opened(model, cold_dir, decoding, alpha=1.0) as (hill, _):
            logits[decoding] = feed(model, held(model, hill), FED[:, :STEPS])
    torch.testing.assert_close(logits["blocks:99%"], logits["keep"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits["blocks:20%"], logits["keep"], atol=1e-3)


class NotedReads(SingleReads):
    """Notes which thread each read of rows is made for."""

    def __init__(self):
        self.readers = []

    def preadv(self, *given):
        self.readers.append(threading.current_thread().name)
        return super().preadv(*given)

    def read_done(self, *given):
        self.readers.append(threading.current_thread().name)
        return super().read_done(*given)


def waited_reads(model, cold_dir):
    """Decode with all rows cold, each layer's end held until what was begun to read is there.

    Return by layer how many reads its attention waited for at tokens where blocks entered, and at
    the others; and how many were made meanwhile by the thread that reads ahead.
    """
    calls, ahead = NotedReads(), 0
    settings = hillinfer.Settings().changed(
        cold_dir=cold_dir, alpha=0.3, dram_budget="25%", block_rows=256
    )
    waited = {True: Counter(), False: Counter()}
    with (
        Attachment(model, settings, calls) as hill,
        hillinfer.prune(model, CUT, ranker="paper", decoding=NAME) as pruning,
    ):
        cache = held(model, hill)
        runtime = cache.engine.runtime
        # What the budget has for hot rows holds something else: whatever it is, none is hot.
        runtime.parts.pools.set_aside(sys.maxsize)
        runtime.parts.pools.redistribute(np.zeros(len(model.model.layers), np.int64))
        own = []

        def hold(module, given):
            """The layer's attention is over, and its FFN has not begun."""
            until(lambda: runtime.parts.pipeline.is_idle)
            until(lambda: all(one.reading.done() for one in runtime.prefetch.unclaimed))
            own.append([*calls.readers])
            calls.readers.clear()

        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(hold)
        # Before the first token nobody was told.
        feed(model, cache, FED[:, :1])
        for token in FED[0, 1:]:
            # Of the token before, and promotions.
            runtime.statistics()
            calls.readers.clear()
            own.clear()
            before = pruning.decoding_of(cache).put_back
            feed(model, cache, token.view(1, 1))
            enters = pruning.decoding_of(cache).put_back > before
            for layer, readers in enumerate(own):
                landed = [one.startswith("hillinfer-land") for one in readers]
                waited[enters][layer] += len(landed) - sum(landed)
                ahead += sum(landed)
    return waited, ahead


def test_blocks_are_read_while_the_layer_before_computes(cold_dir):
    """What enters is waited for in the band's first two layers, and nowhere else."""
    waited, ahead = waited_reads(TinyModel(layers=7).build(), cold_dir)
    assert ahead > 0
    assert all(waited[False][layer] == waited[True][layer] == 0 for layer in range(4, 7))
    # In the band's first layer keys are read besides, by which blocks are ranked. The second one is
    # the twin: nobody could tell it of blocks that only just entered.
    assert waited[False][3] == 0 < waited[True][3]


def test_what_was_announced_is_forgotten_before_a_block_enters(cold_dir):
    """It is for the single token alone, and 64 rows come to the band before that token's."""
    model, under_way = TINY.build(), defaultdict(list)
    settings = {"alpha": 0.3, "dram_budget": "25%", "block_rows": 256}
    with opened(model, cold_dir, ENTER, **settings) as (hill, pruning):
        cache = held(model, hill)
        prefetch = cache.engine.runtime.prefetch

        def look(when, module, given):
            until(lambda: cache.engine.runtime.parts.pipeline.is_idle)
            under_way[when, given[0].shape[1]].append(len(prefetch.unclaimed))

        deciding = model.model.layers[BAND.start - 1].mlp
        deciding.register_forward_pre_hook(partial(look, "before"))
        entered = model.model.layers[BAND.start].input_layernorm
        entered.register_forward_pre_hook(partial(look, "band"))
        feed(model, cache, FED[:, :STEPS])
        assert pruning.decoding_of(cache).computed > 0
    # The twin: rows of the band are read ahead of the token, and stay where no block comes first.
    assert any(under_way["before", 1])
    assert under_way["band", 64]
    assert not any(under_way["band", 64])


@pytest.mark.parametrize(
    ("name", "query"), [(NAME, "true"), (NAME, "predicted"), (ENTER, "predicted")]
)
@torch.no_grad()
def test_forks_cropped_answers_and_broken_steps_go_on_alike(name, query, cold_dir):
    model = TINY.build()

    def strike(struck, module, given):
        # Of several tokens, which are those of a block that enters, or of the step's own.
        if given[0].shape[1] in struck:
            raise StruckError

    with opened(model, cold_dir, name, alpha=0.3, query=query) as (hill, pruning):
        cache = held(model, hill)
        fork, broken = cache.fork(), cache.fork()
        given, half = FED[:, :STEPS], STEPS // 2
        expected = feed(model, cache, given)
        assert torch.equal(feed(model, fork, given), expected)
        for layer, struck in ((1, {1}), (2, {1, 64}), (4, {1, 64}), (4, {1})):
            hook = model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(
                partial(strike, struck)
            )
            with pytest.raises(StruckError):
                feed(model, broken, FED[:, :1])
            hook.remove()
        assert torch.equal(feed(model, broken, given[:, :half]), expected[:half])
        before, other = pruning.decoding_of(broken), broken.fork()
        assert torch.equal(feed(model, other, given[:, half:]), expected[half:])
        told = pruning.decoding_of(other)
        assert sum(told.swaps) > sum(before.swaps) > 0
        assert timeless(told) == timeless(pruning.decoding_of(cache))
        cache.crop(-STEPS)
        if name == ENTER:
            # Rows of blocks that entered lay among those that went, so the prompt is read anew.
            again = hill.new_cache(expected_tokens=1000)
            with pruning.prompt(TOKENS + 1):
                model(IDS, past_key_values=again, logits_to_keep=1)
                last = feed(model, again, given[:, :1])
            expected = torch.cat([last, feed(model, again, given[:, 1:])])
        assert torch.equal(feed(model, cache, given), expected)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_enters_has_the_rows_of_its_block_behind_what_the_band_has_before_it(family, cold_dir):
    """And of nothing behind it: neither later blocks, nor the answer."""
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    plain, prompt = plain_of(model), torch.arange(TOKENS)
    with opened(model, cold_dir, "enter:90%", alpha=1.0) as (hill, pruning):
        cache = held(model, hill)
        kept = prompt[torch.isin(prompt // 64, pruning.read_of(cache).kept[0])]
        feed(model, cache, FED[:, :1])
        (active,) = pruning.decoding_of(cache).active
        fresh = sorted({*active} - {*(kept // 64).tolist()})
        assert len(fresh) > 1
        assert 0 < fresh[0] < int(kept[-1]) // 64
        _, made = plain.through(BAND, plain.boundary[:, kept], kept)
        rows, places = dict(zip(BAND, made, strict=True)), kept
        for block in fresh:
            own = torch.arange(64 * block, 64 * block + 64)
            _, made = plain.through(BAND, plain.boundary[:, own], own, places, rows)
            rows = {
                layer: tuple(torch.cat(both, 1) for both in zip(rows[layer], new, strict=True))
                for layer, new in zip(BAND, made, strict=True)
            }
            places = torch.cat([places, own])
        for layer in BAND:
            with CacheOnDrive(cache).keys(layer) as keys:
                found = keys.float()
            assert found.shape[1] == len(places) + 1
            # Rows are rounded to 16 bits, each layer's from the last one's.
            torch.testing.assert_close(found[:, :-1], rows[layer][0], atol=2e-2, rtol=2e-2)
        # The twin: what sees all of the band, later blocks too, has other rows.
        own = torch.arange(64 * fresh[0], 64 * fresh[0] + 64)
        first = {layer: tuple(one[:, : len(kept)] for one in rows[layer]) for layer in BAND}
        _, other = plain.through(BAND, plain.boundary[:, own], own, kept, first, sees_all=True)
        part = rows[BAND[-1]][0][:, len(kept) : len(kept) + 64]
        assert not torch.allclose(other[-1][0], part, atol=2e-2, rtol=2e-2)


def test_what_has_entered_goes_on_to_a_question_and_is_completed(cold_dir):
    model = TINY.build()
    with opened(model, cold_dir, ENTER, alpha=1.0) as (hill, pruning):
        cache = held(model, hill)
        feed(model, cache, FED[:, :10])
        told = pruning.decoding_of(cache)
        assert told.computed > 0
        with torch.no_grad():
            model(FED[:, 10:20], past_key_values=cache, logits_to_keep=1)
        feed(model, cache, FED[:, 20:30])
        assert pruning.decoding_of(cache).computed >= told.computed
        # Boundary states of the answer are there, so all of it can be read whole.
        assert pruning.complete(cache).is_whole
        assert lengths(cache) == [TOKENS + 30] * 5
        found = feed(model, cache, FED[:, 30:32])
    with attached(model, cold_dir, alpha=1.0) as hill, torch.no_grad():
        whole = hill.new_cache()
        model(torch.cat([IDS, FED[:, :30]], 1), past_key_values=whole, logits_to_keep=1)
        torch.testing.assert_close(found, feed(model, whole, FED[:, 30:32]), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [NAME, ENTER])
@torch.no_grad()
def test_an_answer_that_is_cropped_leaves_none_of_its_rows_without_pruning_either(name, cold_dir):
    """What entered behind it has rows behind its own, so these layers are to be read anew."""
    model = TINY.build()
    with observed(model, cold_dir, None, alpha=1.0) as hill:
        with hillinfer.prune(model, CUT, ranker="paper", decoding=name) as pruning:
            cache = held(model, hill)
            bands = lengths(cache)
            feed(model, cache, FED[:, :STEPS])
            entered = pruning.decoding_of(cache).computed
        cache.crop(-STEPS)
        assert cache.get_seq_length() == TOKENS
        # The twin: where nothing entered the cache goes on with what the prompt's read kept.
        if name == NAME:
            assert (lengths(cache), entered) == (bands, 0)
            feed(model, cache, FED[:, :1])
            return
        assert entered > 0
        first = cache.fork()
        for own in (cache, cache.fork(), first):
            # Nothing goes, and what is lacking still is.
            own.crop(0)
            for given in (FED[:, :1], FED[:, :2]):
                with pytest.raises(CacheUseError, match=f"the {TOKENS} tokens of this cache wait"):
                    model(given, past_key_values=own, logits_to_keep=1)
            assert lengths(own)[: BAND.start] == [TOKENS] * BAND.start
        # The first block never lies behind another one.
        first.crop(64 - TOKENS)
        dense = hill.new_cache(expected_tokens=1000)
        model(IDS[:, :64], past_key_values=dense, logits_to_keep=1)
        assert lengths(first) == lengths(dense)
        expected = feed(model, dense, FED[:, :4])
        torch.testing.assert_close(feed(model, first, FED[:, :4]), expected, atol=2e-3, rtol=2e-3)
        with hillinfer.prune(model, CUT, ranker="paper", decoding=name) as pruning:
            again = hill.new_cache(expected_tokens=1000)
            with pruning.prompt(TOKENS + 1):
                model(IDS, past_key_values=again, logits_to_keep=1)
                expected = feed(model, again, FED[:, :1])
            assert torch.equal(feed(model, cache, FED[:, :1]), expected)


def test_rows_that_entered_are_saved_once_they_lie_in_the_order_of_tokens(cold_dir, tmp_path):
    model, half = TINY.build(), TOKENS // 2
    with opened(model, cold_dir, "enter:99%:1", alpha=1.0) as (hill, pruning):
        cache = held(model, hill)
        feed(model, cache, FED[:, :2])
        # Every block has entered, so all layers have as many rows.
        assert lengths(cache) == [TOKENS + 2] * 5
        for own in (cache, cache.fork()):
            with pytest.raises(SessionError, match="have them in another order: complete it"):
                own.save_session(tmp_path / "session")
            assert not (tmp_path / "session").exists()
        # The twin: what was completed lies in order, and is saved.
        pruning.complete(cache)
        cache.save_session(tmp_path / "session")
    with attached(model, cold_dir, alpha=1.0) as hill, torch.no_grad():
        loaded, dense = hill.load_session(tmp_path / "session"), hill.new_cache()
        loaded.crop(half - TOKENS - 2)
        model(IDS[:, :half], past_key_values=dense, logits_to_keep=1)
        expected = feed(model, dense, FED[:, :4])
        torch.testing.assert_close(feed(model, loaded, FED[:, :4]), expected, atol=2e-3, rtol=2e-3)


def test_states_that_do_not_come_back_end_the_step_and_leave_the_cache(cold_dir):
    model, calls = TINY.build(), Failing()
    settings = hillinfer.Settings().changed(cold_dir=cold_dir, alpha=0.3)
    with (
        Attachment(model, settings, calls) as hill,
        hillinfer.prune(model, CUT, ranker="paper", decoding=ENTER) as pruning,
    ):
        cache = held(model, hill)
        fork = cache.fork()
        calls.reading = OSError(errno.EIO, "broken")
        with pytest.raises(ColdPoolError, match="of states that wait of the cold pool"):
            feed(model, cache, FED[:, :1])
        calls.reading = None
        assert torch.equal(feed(model, cache, FED[:, :9]), feed(model, fork, FED[:, :9]))
        assert pruning.decoding_of(cache).computed > 0


def test_what_goes_on_without_pruning_selects_as_ever(cold_dir):
    model, sets = TINY.build(), defaultdict(list)
    with observed(model, cold_dir, sets, alpha=0.3) as hill:
        with hillinfer.prune(model, CUT, decoding=NAME):
            cache = held(model, hill)
            feed(model, cache, FED[:, :5])
        with hillinfer.prune(model, CUT):
            other = held(model, hill)
            feed(model, other, FED[:, :5])
        sets.clear()
        feed(model, cache, FED[:, 5:10])
        assert lengths(cache) == [one + 5 for one in lengths(other)]
        # As many as a share of the context, not whole blocks.
        assert {len(one[0][0]) for (layer, _), one in sets.items() if layer in BAND} == {
            len(one[0][0]) for (layer, _), one in sets.items() if layer not in BAND
        }


@pytest.mark.parametrize(("cropped", "came"), [(150, 200), (150, 20), (20, 1), (3, 10)])
def test_rows_of_a_cache_that_was_cropped_without_pruning_are_found(cropped, came, cold_dir):
    model, schedule = TINY.build(), {"schedule": "2:30%", "decoding": "blocks:99%:1"}
    with observed(model, cold_dir, None, alpha=1.0, exact=1.0) as hill:
        with hillinfer.prune(model, **schedule):
            cache = held(model, hill)
            if is_answer := came == 10:
                feed(model, cache, FED[:, :5])
        cache.crop(-cropped)
        feed(model, cache, IDS[:, :came])
        bare = feed(model, cache.fork(), FED[:, :3])
        with hillinfer.prune(model, **schedule) as pruning:
            found = feed(model, cache, FED[:, :3])
            # Of a prompt that was cut no block is ranked any more.
            assert (pruning.decoding_of(cache) is not None) == is_answer
    torch.testing.assert_close(found, bare, atol=1e-3, rtol=1e-3)
    # The twin: another token is seen.
    assert float((bare[0] - bare[1]).abs().max()) > 0.01


def test_nothing_enters_where_others_went_on(cold_dir):
    model, computed = TINY.build(), []
    with observed(model, cold_dir, None) as hill:
        for apart in (0, 5):
            with hillinfer.prune(model, CUT, ranker="paper", decoding=ENTER):
                cache = held(model, hill)
            if apart:
                feed(model, cache, FED[:, :apart])
            with hillinfer.prune(model, CUT, ranker="paper", decoding=ENTER) as pruning:
                feed(model, cache, FED[:, apart : apart + STEPS])
                told, kept = pruning.decoding_of(cache), pruning.read_of(cache).kept[0]
                computed.append(told.computed)
    assert {*told.active[0]} <= {*kept.tolist()}
    # The twin: where nobody did, states are there.
    assert computed[0] > 0 == computed[1]


def test_what_blocks_are_not_for_is_refused(cold_dir):
    model = TINY.build()
    for name in (NAME, ENTER):
        with (
            hillinfer.prune(model, CUT, decoding=name) as pruning,
            pytest.raises(UnsupportedFeatureError, match=f'"{name[:-4]}" says .* take .*"swap"'),
        ):
            read(model, pruning)
    with pytest.raises(SettingsError, match="has states for one cut alone"):
        hillinfer.prune(model, "2:50%,4:25%", decoding=ENTER)
    for text in ("blocks", "blocks:half", "blocks:10%:0.9:1", "enter"):
        with pytest.raises(SettingsError, match="choose one of keep, swap, blocks"):
            make_decoding(text)
    for text in ("blocks:0%", "blocks:100%", "blocks:2"):
        with pytest.raises(SettingsError, match="above 0 and below 1"):
            make_decoding(text)
    assert make_decoding("blocks:25%").share == 0.25
    assert make_decoding("swap").share is None
