# SPDX-License-Identifier: Apache-2.0
"""Reading in stages into caches of an attached model: bands with rows of their own."""

import errno
import gc
import math
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from generation_runs import SETTINGS
from test_reading import ANSWER, BY_MASS, IDS, NEW, SCHEDULE, TINY, TOKENS, generated, lengths
from tiny_models import FAMILIES, TinyModel, prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import hillinfer
from hillinfer.drive.calls import DriveCalls
from hillinfer.engine.budget_plan import BudgetPlan
from hillinfer.errors import (
    BudgetError,
    CacheUseError,
    ColdPoolError,
    SessionError,
    SetupWarning,
    UnsupportedFeatureError,
)
from hillinfer.hf.attach import Attachment
from hillinfer.memory_budget import Part
from hillinfer.model_shape import ModelShape
from hillinfer.pruning.caches import CacheOnDrive
from hillinfer.pruning.rankers import SoftmaxWeights
from hillinfer.pruning.reading import Pruning

# 11 blocks of 64, of which the cuts keep 6 and 3; the last one is of 60 tokens.
BANDS = [700, 700, 380, 380, 188]


@pytest.fixture
def model():
    return TINY.build()


def attached(model, cold_dir, **changes):
    settings = {"alpha": 0.2, "dram_budget": "60%"} | changes
    return hillinfer.attach(model, cold_dir=cold_dir, **settings)


def kept_of(pruning, cache):
    return [one.tolist() for one in pruning.read_of(cache).kept]


@pytest.mark.parametrize(
    ("family", "chunk"),
    [*((family, 64) for family in FAMILIES), ("llama", None), ("llama", 699)],
)
def test_a_cache_on_a_drive_keeps_what_an_ordinary_one_keeps(family, chunk, cold_dir):
    model = TinyModel(family, "mha", layers=5).build()
    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        ordinary = DynamicCache(config=model.config)
        tokens, logits = generated(model, IDS, ordinary)
        kept = kept_of(pruning, ordinary)
    with (
        # Everything is attended to, so that rounding rows to 16 bits is all that differs.
        attached(model, cold_dir, alpha=1.0) as hill,
        hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning,
    ):
        cache = hill.new_cache()
        found, own = generated(model, IDS, cache, chunk)
        assert kept_of(pruning, cache) == kept
        assert pruning.read_of(cache).tokens == BANDS
        rows = [one + NEW - 1 for one in BANDS]
        assert lengths(cache) == rows
        row_bytes = hill.statistics().kv_bytes / sum(rows)
        assert row_bytes == 2 * 2 * model.config.num_attention_heads * head_dim(model)
    assert found == tokens
    torch.testing.assert_close(own, logits, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("schedule", BY_MASS)
def test_a_cut_by_mass_keeps_as_much_on_a_drive(schedule, model, cold_dir):
    with hillinfer.prune(model, schedule) as pruning:
        ordinary = DynamicCache(config=model.config)
        tokens, logits = generated(model, IDS, ordinary)
        kept = kept_of(pruning, ordinary)
    with attached(model, cold_dir, alpha=1.0) as hill, hillinfer.prune(model, schedule) as pruning:
        cache = hill.new_cache()
        found, own = generated(model, IDS, cache, 100)
        assert kept_of(pruning, cache) == kept
        assert lengths(cache) == lengths(ordinary)
        # A fork goes on with as much.
        fork = cache.fork()
        assert generated(model, longer(fork), fork)[0] == generated(model, longer(cache), cache)[0]
    assert found == tokens
    torch.testing.assert_close(own, logits, atol=0.03, rtol=0.03)


def head_dim(model):
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def test_a_piece_of_a_single_token_is_none(model, cold_dir):
    """Rows of a band are the same in whatever pieces its tokens come; a single one would select."""
    pieces = {layer: [] for layer in (2, 4)}

    def note(own, module, given):
        own.append(given[0].shape[1])

    for layer, own in pieces.items():
        model.model.layers[layer].mlp.register_forward_pre_hook(partial(note, own))
    # 380 and 188 tokens stay: pieces of 379 and 187 would leave one, and the least are one.
    for ids, chunks in ((IDS, (1024, 379, 187)), (IDS[:, :300], (1024, 1))):
        answers = []
        for chunk in chunks:
            with (
                attached(model, cold_dir, alpha=0.05) as hill,
                hillinfer.prune(model, SCHEDULE, chunk_tokens=chunk) as pruning,
            ):
                cache = hill.new_cache()
                answers.append(generated(model, ids, cache))
                tokens = pruning.read_of(cache).tokens
            for layer, own in pieces.items():
                # Behind the prompt come the decoded ones.
                decoded = NEW - 1
                assert own[-decoded:] == [1] * decoded
                assert sum(own[:-decoded]) == tokens[layer] < ids.shape[1]
                assert 1 not in own[:-decoded]
                own.clear()
        for _, logits in answers:
            torch.testing.assert_close(logits, answers[0][1], atol=1e-3, rtol=1e-3)


PLACEMENTS = {
    "in DRAM": {"dram_budget": "120%"},
    "a tenth": {"dram_budget": "10%"},
    "one block ahead": {"dram_budget": "10%", "prefetch_blocks": 1},
    "golden": {"device": "golden"},
    # A device scores the one segment of each layer, or the host does.
    "beta 0": {"device": "core", "beta": 0.0},
    "beta 1": {"device": "core", "beta": 1.0},
}


# Past the end of a group, whose rows then lie on the drive like those of the prompt.
DECODED = 8


@pytest.mark.parametrize(
    ("query", "places"),
    [("predicted", PLACEMENTS), ("true", ("in DRAM", "a tenth", "beta 0", "beta 1"))],
    ids=["predicted", "true"],
)
def test_bits_are_the_same_wherever_rows_lie(query, places, model, cold_dir):
    answers, scored = {}, {}
    for name in places:
        changes = PLACEMENTS[name]
        with (
            attached(model, cold_dir, query=query, **changes) as hill,
            hillinfer.prune(model, SCHEDULE),
        ):
            cache = hill.new_cache()
            tokens, logits = generated(model, IDS, cache, 100, DECODED)
            answers[name] = tokens, logits.numpy().tobytes()
            scored[name] = cache.statistics().device_scored_tokens
    assert scored["beta 0"] > scored["beta 1"] == 0
    for name, answer in answers.items():
        assert answer == answers["in DRAM"], name
    with attached(model, cold_dir, query=query) as hill, hillinfer.prune(model, "2:25%"):
        _, other = generated(model, IDS, hill.new_cache(), 100, DECODED)
    # Other blocks are other bits.
    assert other.numpy().tobytes() != answers["a tenth"][1]


@pytest.mark.parametrize(
    ("alpha", "query", "device"),
    [
        (0.1, "predicted", "nvme"),
        (0.4, "true", "nvme"),
        (0.4, "predicted", "golden"),
        (0.1, "true", "golden"),
    ],
)
def test_alpha_counts_what_a_band_has_not(alpha, query, device, model, cold_dir):
    """Each layer attends to as many tokens as without pruning, as long as it has them."""
    with (
        attached(model, cold_dir, alpha=alpha, query=query, device=device) as hill,
        hillinfer.prune(model, SCHEDULE),
    ):
        cache = hill.new_cache()
        generated(model, IDS, cache)
        found = hill.statistics().selected_tokens
    steps = range(1, NEW)
    assert found == sum(
        min(rows + step, math.floor(alpha * (TOKENS + step) + 0.5))
        for step in steps
        for rows in BANDS
    )


def test_forks_go_on_by_themselves(model, cold_dir):
    # Their answers end a group of every band.
    ways = [prompts([62], seed=seed)[0] for seed in (5, 6)]
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        alone = []
        for way in ways:
            cache = hill.new_cache()
            answer, _ = generated(model, IDS, cache)
            turn = torch.cat([IDS, torch.tensor([answer]), way], 1)
            alone.append(generated(model, turn, cache, None, 6))
            cache.close()
        first = hill.new_cache()
        answer, _ = generated(model, IDS, first)
        second = first.fork()
        assert pruning.read_of(second) == pruning.read_of(first)
        for cache, way, (tokens, logits) in zip((first, second), ways, alone, strict=True):
            turn = torch.cat([IDS, torch.tensor([answer]), way], 1)
            found, own = generated(model, turn, cache, None, 6)
            assert found == tokens
            assert torch.equal(own, logits)
        shared = hill.statistics().kv_bytes
        first.close()
        # Rows that the fork shares stay.
        again, _ = generated(model, longer(second), second)
        assert len(again) == NEW
        assert hill.statistics().kv_bytes < shared
    assert alone[0][0] != alone[1][0]


def longer(cache):
    return torch.cat([torch.tensor(cache.token_ids), ANSWER], 1)


@pytest.mark.parametrize("tokens_to_remove", [3, 90, 400, 690])
def test_what_is_cropped_is_gone_from_every_band(tokens_to_remove, model, cold_dir):
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache()
        generated(model, IDS, cache, None, 10)
        kept = [torch.tensor(one) for one in kept_of(pruning, cache)]
        before, left = TOKENS + 9, TOKENS + 9 - tokens_to_remove
        cache.crop(-tokens_to_remove)
        rows = [int((positions_of(one, before) < left).sum()) for one in kept]
        assert lengths(cache) == [left, left, rows[0], rows[0], rows[1]]
        fork = cache.fork()
        with torch.no_grad():
            both = [model(ANSWER, past_key_values=one).logits for one in (cache, fork)]
        assert torch.equal(*both)
        assert lengths(cache) == lengths(fork)


def positions_of(blocks, tokens):
    inside = (blocks[:, None] * 64 + torch.arange(64)).flatten()
    return torch.cat([inside[inside < TOKENS], torch.arange(TOKENS, tokens)])


def test_a_cropped_answer_comes_again(model, cold_dir):
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        cache = hill.new_cache()
        answer, _ = generated(model, IDS, cache)
        fork = cache.fork()
        turn = torch.cat([IDS, torch.tensor([answer]), ANSWER], 1)
        expected, logits = generated(model, turn, fork)
        generated(model, turn, cache)
        cache.crop(-(cache.get_seq_length() - TOKENS - NEW + 1))
        found, own = generated(model, turn, cache)
    assert found == expected
    assert torch.equal(own, logits)


def test_beams_share_what_a_prompt_kept(model, cold_dir):
    answers = []
    for budget in ("10%", "120%"):
        with attached(model, cold_dir, dram_budget=budget) as hill:
            with hillinfer.prune(model, SCHEDULE) as pruning:
                cache = hill.new_cache()
                out = model.generate(
                    IDS, past_key_values=cache, num_beams=3, max_new_tokens=8, pad_token_id=0
                )
                assert pruning.read_of(cache).tokens == BANDS
            answers.append(out[0].tolist())
            assert cache.batch_size == 3
    assert answers[0] == answers[1]
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        cache = hill.new_cache()
        out = model.generate(
            IDS, past_key_values=cache, num_return_sequences=2, do_sample=True, max_new_tokens=4,
            pad_token_id=0,
        )  # fmt: skip
        assert out.shape[0] == 2


def test_an_ordinary_cache_of_an_attached_model_is_read_as_without(model, cold_dir):
    """In pieces, and turns behind them: its attention needs a mask, which HillInfer's does not."""
    expected, kept = [], []
    for attaches in (False, True):
        hill = attached(model, cold_dir) if attaches else None
        with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
            cache = DynamicCache(config=model.config)
            first, logits = generated(model, IDS, cache, 200)
            turn = torch.cat([IDS, torch.tensor([first]), ANSWER], 1)
            second, more = generated(model, turn, cache)
            expected.append((first, second, logits, more))
            kept.append(kept_of(pruning, cache))
        if hill is not None:
            hill.detach()
    assert expected[0][:2] == expected[1][:2]
    assert kept[0] == kept[1]
    for one, other in zip(expected[0][2:], expected[1][2:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_long_prompt_has_the_same_bits_wherever_shadows_lie(model, cold_dir):
    """Bands with segments that are full, in memory and streamed from the drive."""
    ids, _ = prompts([4020], seed=11)
    answers = []
    # What a context needs at least, some shadows of which are streamed, and open groups of bands.
    shape = ModelShape.from_config(model.config, model.dtype)
    least = hillinfer.Settings().changed(**SETTINGS, shadow="int8")
    least = replace(least, dram_budget=hillinfer.ByteSize(byte_count=1))
    tight = BudgetPlan.for_context(shape, least, 4090).required_bytes + (160 << 10)
    for budget, outgrown in (
        ("16MiB", nullcontext()),
        (tight, pytest.warns(SetupWarning, match="on the drive")),
    ):
        settings = SETTINGS | {"dram_budget": budget, "alpha": 0.1, "shadow": "int8"}
        with (
            outgrown,
            attached(model, cold_dir, **settings) as hill,
            hillinfer.prune(model, "2:60%,4:45%"),
        ):
            cache = hill.new_cache(expected_tokens=4090)
            answers.append(generated(model, ids, cache, 1000, 16))
            rows = [4035, 4035, *[lengths(cache)[2]] * 2, lengths(cache)[4]]
            assert lengths(cache) == rows
            assert 1024 < rows[4] < rows[2] < 4035
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_a_cache_that_was_emptied_takes_another_prompt(later, model, cold_dir):
    other, _ = prompts([650], seed=13)
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE, later=later) as one:
        fresh, cache = hill.new_cache(), hill.new_cache()
        expected = generated(model, other, fresh, 100)
        for empty in (lambda: cache.crop(-cache.get_seq_length()), cache.reset):
            generated(model, IDS, cache, 100)
            empty()
            found = generated(model, other, cache, 100)
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1])
            assert lengths(cache) == lengths(fresh)
            assert kept_of(one, cache) == kept_of(one, fresh)
            cache.reset()
        # What is too short is in every layer, bands or not.
        generated(model, IDS, cache)
        cache.crop(-cache.get_seq_length())
        found = generated(model, ANSWER, cache, None, 3)
        assert lengths(cache) == [ANSWER.shape[1] + 2] * 5
        assert found[0] == generated(model, ANSWER, hill.new_cache(), None, 3)[0]


def test_nothing_is_chosen_anew_where_states_are_not_there(model, cold_dir):
    with attached(model, cold_dir) as hill:
        cache, other = hill.new_cache(), hill.new_cache()
        with hillinfer.prune(model, SCHEDULE) as pruning:
            generated(model, IDS, cache)
            fork = cache.fork()
            kept = kept_of(pruning, cache)
        turn = longer(cache)
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            with pytest.raises(UnsupportedFeatureError, match="nothing can be chosen anew"):
                generated(model, turn, cache)
            generated(model, IDS, other)
        # A turn that no pruning saw has no states either.
        generated(model, longer(other), other)
        with (
            hillinfer.prune(model, SCHEDULE, later="anew"),
            pytest.raises(UnsupportedFeatureError, match="nothing can be chosen anew"),
        ):
            generated(model, longer(other), other)
        with hillinfer.prune(model, SCHEDULE) as pruning:
            found = generated(model, turn, cache)
            expected = generated(model, turn, fork)
            assert kept_of(pruning, cache) == kept
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_rows_that_parted_do_not_choose_anew(model, cold_dir):
    with (
        attached(model, cold_dir) as hill,
        hillinfer.prune(model, SCHEDULE, later="anew") as pruning,
    ):
        cache = hill.new_cache()
        out = model.generate(
            IDS, past_key_values=cache, num_beams=3, num_return_sequences=3, max_new_tokens=9,
            pad_token_id=0,
        )  # fmt: skip
        kept, before = kept_of(pruning, cache), lengths(cache)
        turn = torch.cat([out[:, : before[0]], ANSWER.expand(3, -1)], 1)
        mask = torch.ones_like(turn)
        with pytest.raises(UnsupportedFeatureError, match="sequences at once"), torch.no_grad():
            model(turn[:, before[0] :], attention_mask=mask, past_key_values=cache)
        assert lengths(cache) == before
        cache.batch_select_indices(torch.tensor([1]))
        with pytest.raises(UnsupportedFeatureError, match="in several rows"), torch.no_grad():
            model(turn[1:2, before[0] :], past_key_values=cache)
        assert kept_of(pruning, cache) == kept


def test_a_document_that_waits_is_not_answered_without_its_pruning(model, cold_dir):
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with hillinfer.prune(model, SCHEDULE) as pruning:
            with pruning.prompt(TOKENS + 1), torch.no_grad():
                model(IDS, past_key_values=cache)
            assert lengths(cache) == [TOKENS, TOKENS, 0, 0, 0]
        with pytest.raises(CacheUseError, match="wait to be read by deeper layers"):
            generated(model, longer(cache), cache)
        with hillinfer.prune(model, SCHEDULE):
            found = generated(model, torch.cat([IDS, ANSWER], 1), cache)
            expected = generated(model, torch.cat([IDS, ANSWER], 1), hill.new_cache(), TOKENS)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("attaches", "place", "error"),
    [
        (True, "lm_head", RuntimeError),
        (True, "lm_head", KeyboardInterrupt),
        (True, "model.norm", KeyboardInterrupt),
        (True, "model.layers.1", KeyboardInterrupt),
        (True, "model.layers.3", RuntimeError),
        (True, "model.layers.3", KeyboardInterrupt),
        # Between layers transformers' own cache is left with several lengths.
        (False, "lm_head", KeyboardInterrupt),
        (False, "model.norm", RuntimeError),
    ],
)
def test_what_breaks_off_anywhere_lets_another_question_choose(
    attaches, place, error, model, cold_dir
):
    """Behind the layers, too: the prompt's last chunk did not count, nor does what it chose."""
    questions = [prompts([40], seed=seed)[0] for seed in (21, 22)]
    hill = attached(model, cold_dir) if attaches else None

    def cached():
        return hill.new_cache() if hill else DynamicCache(config=model.config)

    def read(ids, cache):
        with pruning.prompt(TOKENS + 40, 40), torch.no_grad():
            held = cache.get_seq_length()
            for chunk in ids[:, held:].split(350, 1):
                out = model(chunk, past_key_values=cache, logits_to_keep=1).logits
        return out

    def breaks(*given):
        raise error

    with hillinfer.prune(model, SCHEDULE, chunk_tokens=100) as pruning:
        whole, broken = cached(), cached()
        first, second = (torch.cat([IDS, one], 1) for one in questions)
        with pruning.prompt(TOKENS + 40, 40), torch.no_grad():
            model(IDS, past_key_values=broken, logits_to_keep=1)
        hook = model.get_submodule(place).register_forward_pre_hook(breaks)
        with pytest.raises(error):
            read(first, broken)
        hook.remove()
        if not attaches:
            # An ordinary cache does not know that the pass did not count.
            broken.crop(TOKENS - broken.get_seq_length())
        with pruning.prompt(TOKENS + 40, 40), torch.no_grad():
            model(IDS, past_key_values=whole, logits_to_keep=1)
        expected, found = read(second, whole), read(second, broken)
        assert kept_of(pruning, broken) == kept_of(pruning, whole)
        assert torch.equal(found, expected)
    if hill is not None:
        hill.detach()


class BrokenError(Exception):
    pass


@pytest.mark.parametrize(
    ("layer", "later", "chunk"),
    [
        # Every two of them together.
        (0, "keep", None),
        (0, "anew", 200),
        (2, "keep", 200),
        (2, "anew", None),
        (4, "keep", None),
        (4, "anew", 200),
    ],
)
def test_a_prompt_that_breaks_off_leaves_the_cache_as_it_was(layer, later, chunk, model, cold_dir):
    with (
        attached(model, cold_dir) as hill,
        hillinfer.prune(model, SCHEDULE, later=later, chunk_tokens=100) as pruning,
    ):
        whole, broken = hill.new_cache(), hill.new_cache()
        expected = generated(model, IDS, whole, chunk)
        turn = torch.cat([IDS, torch.tensor([expected[0]]), ANSWER], 1)
        following = generated(model, turn, whole, chunk)
        for ids, (tokens, logits) in ((IDS, expected), (turn, following)):
            for after in (0, 0, 1) if layer > 1 and ids is IDS else (0, 0):
                with breaking(model, layer, after), pytest.raises(BrokenError):
                    generated(model, ids, broken, chunk, 1)
            found, own = generated(model, ids, broken, chunk)
            assert found == tokens
            assert torch.equal(own, logits)
        assert lengths(broken) == lengths(whole)
        assert kept_of(pruning, broken) == kept_of(pruning, whole)


@pytest.mark.parametrize("layer", [0, 1, 2, 3, 4])
def test_a_decoded_token_that_breaks_off_comes_again(layer, model, cold_dir):
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        cache = hill.new_cache()
        generated(model, IDS, cache)
        fork = cache.fork()
        token = ANSWER[:, :1]
        for _ in range(2):
            with breaking(model, layer, 0), pytest.raises(BrokenError), torch.no_grad():
                model(token, past_key_values=cache)
        with torch.no_grad():
            both = [model(token, past_key_values=one).logits for one in (cache, fork)]
        assert torch.equal(*both)
        assert lengths(cache) == lengths(fork)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_others_bring_behind_a_token_that_broke_off_is_not_taken_for_ours(
    breaks, model, cold_dir
):
    with attached(model, cold_dir) as hill, torch.no_grad():
        with hillinfer.prune(model, SCHEDULE, later="anew"):
            cache = hill.new_cache()
            generated(model, IDS, cache)
            if breaks:
                with breaking(model, 3, 0), pytest.raises(BrokenError):
                    model(ANSWER[:, :1], past_key_values=cache)
        # As many tokens as before, and others.
        cache.crop(-2)
        model(IDS[:, :2], past_key_values=cache)
        if not breaks:
            model(IDS[:, 2:3], past_key_values=cache)
        with (
            hillinfer.prune(model, SCHEDULE, later="anew"),
            pytest.raises(UnsupportedFeatureError, match="nothing can be chosen anew"),
        ):
            model(IDS[:, :20], past_key_values=cache)


class breaking:  # noqa: N801
    """Breaks off in a layer, after so many calls of it."""

    def __init__(self, model, layer, after):
        self._module, self._left = model.get_decoder().layers[layer].mlp, after

    def __enter__(self):
        self._hook = self._module.register_forward_pre_hook(self._count)

    def __exit__(self, *error):
        self._hook.remove()

    def _count(self, *given):
        self._left -= 1
        if self._left < 0:
            raise BrokenError


def test_a_later_question_chooses_anew(model, cold_dir):
    questions = [prompts([90], seed=seed)[0] for seed in (8, 9)]
    chosen = []
    for attaches in (False, True):
        with hillinfer.prune(model, SCHEDULE, later="anew") as pruning:
            hill = attached(model, cold_dir, alpha=1.0) if attaches else None
            cache = hill.new_cache() if hill else DynamicCache(config=model.config)
            ids, kept = IDS, []
            for question in questions:
                ids = torch.cat([ids, question], 1)
                generated(model, ids, cache, 100, 1)
                kept.append(kept_of(pruning, cache))
            chosen.append(kept)
            if hill:
                fork = cache.fork()
                assert (
                    generated(model, longer(fork), fork, 100)[0]
                    == (generated(model, longer(cache), cache, 100)[0])
                )
                hill.detach()
    assert chosen[0] == chosen[1]
    assert chosen[0][0] != chosen[0][1]


def test_what_is_too_short_has_the_bits_of_no_pruning(model, cold_dir):
    short = IDS[:, :60]
    with attached(model, cold_dir) as hill:
        tokens, logits = generated(model, short, hill.new_cache(), None, 8)
        with hillinfer.prune(model, SCHEDULE) as pruning:
            cache = hill.new_cache()
            found, own = generated(model, short, cache, None, 8)
            assert pruning.read_of(cache) is None
            # Where nothing is dropped, either.
    with attached(model, cold_dir) as hill, hillinfer.prune(model, "2:mass=100%") as pruning:
        whole = hill.new_cache()
        _, all_kept = generated(model, IDS, whole, 100)
        assert pruning.read_of(whole) is None
    with attached(model, cold_dir) as hill:
        _, plain = generated(model, IDS, hill.new_cache(), 100)
    assert found == tokens
    assert torch.equal(own, logits)
    assert torch.equal(all_kept, plain)


class Failing(DriveCalls):
    """Fails, or brings other bytes, where it is told to; rows' own thread writes all the same."""

    reading = writing = None

    def __init__(self):
        super().__init__()
        self._of_states = threading.get_ident()

    def fail(self, doing, failure):
        setattr(self, doing, failure)

    def preadv(self, descriptor, into, offset):
        if isinstance(self.reading, OSError):
            raise self.reading
        count = super().preadv(descriptor, into, offset)
        if self.reading is not None:
            into[count // 2] ^= self.reading
        return count

    def pwrite(self, descriptor, data, offset):
        if self.writing is not None and threading.get_ident() == self._of_states:
            raise self.writing
        return super().pwrite(descriptor, data, offset)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("reading", 1),
        ("reading", OSError(errno.EIO, "broken")),
        ("writing", OSError(errno.ENOSPC, "full")),
    ],
)
def test_states_that_a_drive_does_not_take_or_give_are_an_error_and_no_answer(
    name, failure, model, cold_dir
):
    calls, settings = Failing(), hillinfer.Settings().changed(cold_dir=cold_dir, alpha=0.2)
    with Attachment(model, settings, calls) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        cache = hill.new_cache()
        # No row leaves its open group before these states are written.
        first = 600 if name == "reading" else 0
        with pruning.prompt(TOKENS), torch.no_grad():
            for chunk in IDS[:, :first].split(100, 1)[: first // 100]:
                model(chunk, past_key_values=cache, logits_to_keep=1)
            calls.fail(name, failure)
            with pytest.raises(ColdPoolError, match="of states that wait of the cold pool"):
                model(IDS[:, first : first + 50 if name == "writing" else None],
                      past_key_values=cache, logits_to_keep=1)  # fmt: skip
        calls.fail(name, None)
        found = generated(model, IDS, cache, 100)
        whole = hill.new_cache()
        expected = generated(model, IDS, whole, 100)
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert lengths(cache) == lengths(whole)


@pytest.mark.parametrize("later", ["keep", "anew"])
def test_states_lie_in_files_that_go_with_them(later, model, cold_dir):
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE, later=later):
        cache = hill.new_cache()
        generated(model, IDS, cache, None, 1)
        turn, answers = torch.cat([IDS, ANSWER], 1), []
        gc.collect()
        before = descriptors()
        for _ in range(3):
            fork = cache.fork()
            answers.append(generated(model, turn, fork, 64, 1))
            fork.close()
        del fork
        gc.collect()
        # A fork writes what is its own, behind what it shares.
        assert descriptors() == before
        generated(model, turn, cache, 64, 1)
        # Whoever still has the closed cache keeps no file of it.
        cache.close()
        gc.collect()
        assert descriptors() < before
    assert all(torch.equal(one[1], answers[0][1]) for one in answers)


def descriptors():
    """How many are open, without the rings of threads, which each makes when it first reads."""
    links = (one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink())
    return sum("io_uring" not in str(one) for one in links)


def test_states_of_an_encrypted_pool_stay_in_the_budget(model, cold_dir):
    with (
        attached(model, cold_dir, encrypt_cold_pool="yes", dram_budget="3MiB") as hill,
        hillinfer.prune(model, SCHEDULE) as pruning,
    ):
        cache = hill.new_cache(expected_tokens=1000)
        generated(model, IDS, cache, 100)
        read = pruning.read_of(cache)
        assert read.boundary_bytes == TOKENS * model.config.hidden_size * 4
        assert cache.notes.boundary.file is None
        assert hill.statistics().dram_peak_bytes <= 3 << 20
        with pytest.raises(BudgetError, match="raise --dram-budget"):
            generated(model, prompts([30000], seed=3)[0], hill.new_cache(), 1000)


def test_what_cannot_be_read_in_stages_is_refused(model, cold_dir, tmp_path):
    two, _ = prompts([700, 700], seed=4)
    padded, mask = prompts([700, 650], seed=4)
    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE):
        cache = hill.new_cache()
        with pytest.raises(UnsupportedFeatureError, match="2 sequences at once"):
            model.generate(two, past_key_values=cache, max_new_tokens=2, pad_token_id=0)
        with pytest.raises(UnsupportedFeatureError, match="the prompt is padded"):
            model.generate(
                padded[1:], attention_mask=mask[1:], past_key_values=hill.new_cache(),
                max_new_tokens=2, pad_token_id=0,
            )  # fmt: skip
        generated(model, IDS, cache)
        with pytest.raises(SessionError, match="read in stages"):
            cache.save_session(tmp_path / "session")
        other = hill.new_cache()
        generated(model, IDS, other)
        joined = hill.join([cache, other])
        with pytest.raises((UnsupportedFeatureError, CacheUseError), match="not a JoinedCache"):
            model(**joined.inputs(ANSWER[:, :1].expand(2, -1)))
        # Both go on.
        generated(model, longer(cache), cache)
        generated(model, longer(other), other)


def test_a_cache_goes_on_by_the_schedule_that_it_began_with_or_by_none(model, cold_dir):
    with attached(model, cold_dir) as hill:
        caches = [hill.new_cache() for _ in range(2)]
        with hillinfer.prune(model, SCHEDULE):
            for cache in caches:
                generated(model, IDS, cache)
        turn = longer(caches[0])
        with (
            hillinfer.prune(model, "2:50%"),
            pytest.raises(UnsupportedFeatureError, match="2:50%,4:25%, and not by 2:50%"),
        ):
            generated(model, turn, caches[0])
        with hillinfer.prune(model, SCHEDULE):
            expected = generated(model, turn, caches[0])
        # New tokens meet what each band has, whoever knows of bands.
        found = generated(model, turn, caches[1])
        assert lengths(caches[0]) == lengths(caches[1])
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("first", ["attachment", "pruning"])
def test_whichever_is_taken_off_first_the_model_is_as_it_was(first, model, cold_dir):
    plain, _ = generated(model, IDS)
    before = dict(model.__dict__)
    hill = attached(model, cold_dir)
    pruning = hillinfer.prune(model, SCHEDULE)
    generated(model, IDS, hill.new_cache())
    endings = [hill.detach, pruning.remove]
    for end in endings if first == "attachment" else reversed(endings):
        end()
    assert generated(model, IDS)[0] == plain
    assert model.__dict__.keys() == before.keys()


@pytest.mark.parametrize("schedule", [SCHEDULE, "2:mass=70%"])
def test_keys_that_decide_are_counted(schedule, model, cold_dir):
    """All memory that they take, as long as they are there, and nothing of it behind them."""
    seen = []

    class Looking(SoftmaxWeights):
        def scores(self, deciding):
            held = cache.engine.runtime.parts.accountant.held()[Part.STAGING]
            seen.append((held, deciding.keys.untyped_storage().nbytes(), deciding.keys.shape))
            return super().scores(deciding)

    with (
        attached(model, cold_dir) as hill,
        Pruning(model, hillinfer.Schedule.parse(schedule), Looking()) as pruning,
    ):
        cache = hill.new_cache()
        generated(model, IDS, cache, 100)
        after = cache.engine.runtime.parts.accountant.held()[Part.STAGING]
        tokens = [TOKENS, pruning.read_of(cache).tokens[2]][: len(pruning.schedule.cuts)]
    assert [size for _, size, _ in seen] == [one * 2 * 8 * 2 for one in tokens]
    assert [held - after for held, _, _ in seen] == [size for _, size, _ in seen]


class CountingRows(CacheOnDrive):
    """Notes how many rows the drive is asked for when keys that decide are wanted."""

    def __init__(self, cache, noted):
        super().__init__(cache)
        self._noted = noted

    @contextmanager
    def keys(self, layer, unit_tokens=None):
        before = self._cache.statistics().cold_useful_bytes
        with super().keys(layer, unit_tokens) as found:
            more = self._cache.statistics().cold_useful_bytes - before
            self._noted.append(more // self._cache.engine.runtime.shape.row_bytes)
            yield found


class Forgetting(CountingRows):
    """Does not take keys that attention reads."""

    def expect_keys(self, layer, tokens):
        pass


def test_keys_that_decide_are_read_once(model, cold_dir):
    """Attention of the last chunk reads those before it; the twin reads them once more."""
    found, read, kept = [], [], []
    # More than is hot.
    ids, _ = prompts([1500], seed=3)

    class Looking(SoftmaxWeights):
        def scores(self, deciding):
            found.append(deciding.keys.clone())
            return super().scores(deciding)

    for kind in (CountingRows, Forgetting):
        given = {"know_cache": lambda cache, _, kind=kind: kind(cache, read)}
        with (
            attached(model, cold_dir, **PLACEMENTS["a tenth"]) as hill,
            Pruning(model, hillinfer.Schedule.parse("4:50%"), Looking(), **given) as pruning,
        ):
            cache = hill.new_cache()
            generated(model, ids, cache, 200)
            kept.append(kept_of(pruning, cache))
    # Of the last chunk, and of all of the prompt.
    assert read[0] <= 100 < read[1]
    assert torch.equal(*found)
    assert found[0].shape == (2, 1500, 8)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("place", ["self_attn", "post_attention_layernorm", "mlp"])
def test_keys_that_decide_go_where_their_layer_breaks_off(place, model, cold_dir):
    """Before attention reads them, or behind it."""

    def breaks(*given):
        raise BrokenError

    with attached(model, cold_dir) as hill, hillinfer.prune(model, SCHEDULE) as pruning:
        logits = []
        for broken in (True, False):
            cache = hill.new_cache()
            with pruning.prompt(TOKENS), torch.no_grad():
                model(IDS[:, :400], past_key_values=cache, logits_to_keep=1)
                before = cache.engine.runtime.parts.accountant.held()[Part.STAGING]
                if broken:
                    hook = model.model.layers[1].get_submodule(place)
                    hook = hook.register_forward_pre_hook(breaks)
                    with pytest.raises(BrokenError):
                        model(IDS[:, 400:], past_key_values=cache, logits_to_keep=1)
                    hook.remove()
                    assert cache.engine.runtime.parts.accountant.held()[Part.STAGING] == before
                out = model(IDS[:, 400:], past_key_values=cache, logits_to_keep=1)
            assert cache.engine.runtime.parts.accountant.held()[Part.STAGING] == before
            logits.append(out.logits)
        assert torch.equal(*logits)


class Widest(TorchDispatchMode):
    """Notes how many tokens' hidden states any one tensor has."""

    def __init__(self, hidden_size):
        super().__init__()
        self._hidden_size, self.tokens = hidden_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and one.ndim == 3:
                batch, tokens, size = one.shape
                if (batch, size) == (1, self._hidden_size):
                    self.tokens = max(self.tokens, tokens)
        return out


@pytest.mark.parametrize("sealed", ["no", "yes"])
def test_states_are_in_memory_chunk_by_chunk(sealed, model, cold_dir):
    """Of a band as of what waits, however many tokens stay."""
    widest = []
    for chunk in (70, 1000):
        with (
            attached(model, cold_dir, alpha=1.0, encrypt_cold_pool=sealed) as hill,
            hillinfer.prune(model, SCHEDULE, chunk_tokens=chunk) as pruning,
        ):
            cache = hill.new_cache()
            with Widest(model.config.hidden_size) as seen:
                generated(model, IDS, cache, 70, 1)
            assert pruning.read_of(cache).tokens == BANDS
            widest.append(seen.tokens)
    # The last two pieces together give the last token; in one piece the first band is.
    assert widest == [70 + BANDS[4] % 70, BANDS[2]]


def test_a_drive_that_takes_no_states_between_bands_is_an_error(model, cold_dir):
    calls, settings = Failing(), hillinfer.Settings().changed(cold_dir=cold_dir, alpha=0.2)
    with Attachment(model, settings, calls) as hill, hillinfer.prune(model, SCHEDULE):
        cache = hill.new_cache()

        def full(*given):
            calls.writing = OSError(errno.ENOSPC, "full")

        hook = model.model.layers[3].mlp.register_forward_pre_hook(full)
        with pytest.raises(ColdPoolError, match="of states that wait of the cold pool"):
            generated(model, IDS, cache)
        hook.remove()
        calls.writing = None
        expected = generated(model, IDS, hill.new_cache())
        found = generated(model, IDS, cache)
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
