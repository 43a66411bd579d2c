# SPDX-License-Identifier: Apache-2.0
"""Blocks that move while tokens are decoded, beside plain torch that knows the paper's rule."""

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_reading import (
    ANSWER,
    IDS,
    SCHEDULE,
    TINY,
    TOKENS,
    StruckError,
    cut_back,
    generated,
    lengths,
    turned,
)
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import DynamicCache

import hillinfer
from hillinfer.errors import SettingsError, UnsupportedFeatureError
from hillinfer.pruning.block_policies import PAPER_GAMMA, Decoding, make_decoding
from hillinfer.pruning.rankers import RANKERS
from hillinfer.pruning.reading import Pruning
from hillinfer.pruning.schedule import Schedule

# Layers of the two bands behind the cuts, and the layers that decide.
BANDS, DECIDE = (range(2, 4), range(4, 5)), (1, 3)
# The paper's window; and the prompt's last block, of 60 tokens.
WINDOW, LAST = 4, 10
FED, _ = prompts([40], seed=21)


@torch.no_grad()
def read(model, pruning, ids=IDS):
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def feed(model, cache, tokens):
    """Decode tokens one by one; return logits behind each."""
    return torch.stack(
        [model(token.view(1, 1), past_key_values=cache).logits[0, -1] for token in tokens[0]]
    )


def rows_of(cache):
    return [(one.keys[0], one.values[0]) for one in cache.layers]


def positions(active, length):
    """Return the positions of a band that has these blocks of the prompt, and all behind it."""
    inside = (torch.tensor(active)[:, None] * 64 + torch.arange(64)).flatten()
    return torch.cat([inside[inside < TOKENS], torch.arange(TOKENS, length)])


def same(one, other):
    flat, others = ([tensor for rows in both for tensor in rows] for both in (one, other))
    return all(torch.equal(a, b) for a, b in zip(flat, others, strict=True))


class Plain:
    """A model's layers by hand, of Llama and its kin; with nothing of what is tested."""

    def __init__(self, model):
        self.decoder, self.head = copy.deepcopy(model.get_decoder()), model.lm_head
        places = torch.arange(TOKENS)
        self.boundary, _ = self.through(range(2), self.embedded(IDS, places), places)

    @torch.no_grad()
    def through(self, layers, hidden, places, held=None, rows=None, sees_all=False):
        """Return states behind layers, and their rows; `held` are positions of rows there."""
        made, held = [], torch.arange(0) if held is None else held
        hides = torch.cat([held, places]) > places[:, None]
        for number in layers:
            layer = self.decoder.layers[number]
            attention, normed = layer.self_attn, self.norm(layer)(hidden)
            queries = self.heads(attention, "q", normed, places)
            keys = self.heads(attention, "k", normed, places)
            values = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
            made.append((keys, values[0].transpose(0, 1)))
            before = [] if rows is None else [rows[number]]
            keys, values = (torch.cat(both, 1) for both in zip(*before, made[-1], strict=True))
            groups = len(queries) // len(keys)
            keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
            weights = queries @ keys.transpose(1, 2) * attention.scaling
            if not sees_all:
                weights = weights.masked_fill(hides, -torch.inf)
            mixed = (weights.softmax(-1) @ values).transpose(0, 1).flatten(1)[None]
            hidden = self.fed(layer, hidden, mixed)
        return hidden, made

    def embedded(self, ids, places):
        return self.decoder.embed_tokens(ids)

    @staticmethod
    def norm(layer):
        return layer.input_layernorm

    def fed(self, layer, hidden, mixed):
        hidden = hidden + layer.self_attn.o_proj(mixed)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden):
        return self.head(self.decoder.norm(hidden))[0, -1]

    def heads(self, attention, which, normed, places):
        projection = getattr(attention, f"{which}_proj")
        return turned(self.decoder, attention, projection, f"{which}_norm", normed, places)

    @torch.no_grad()
    def candidates(self, number, entering, keys, before, count, length):
        """Return the paper's choice: as many of the prompt's blocks as `count`, best units first.

        `entering` are states that entered the deciding layer, of the last tokens.
        """
        layer = self.decoder.layers[DECIDE[number]]
        places = torch.arange(length - WINDOW, length)
        queries = self.heads(layer.self_attn, "q", self.norm(layer)(entering), places)
        mean = queries.mean(1).unflatten(0, (len(keys), -1)).mean(1)
        scores = {}
        for block in range(1, LAST):
            inside = (before // 64 == block).nonzero().flatten()
            if len(inside):
                units = keys[:, inside].unflatten(1, (8, 8)).mean(2)
                scores[block] = float((mean[:, None] * units).sum(-1).mean(0).max())
        best = sorted(scores, key=scores.get, reverse=True)
        return {0, LAST, *best[: count - 2]}


class PlainOpt(Plain):
    """OPT's: positions come with the embedding, and nothing turns keys."""

    def embedded(self, ids, places):
        # Two places come before the first.
        return self.decoder.embed_tokens(ids) + self.decoder.embed_positions.weight[places + 2]

    @staticmethod
    def norm(layer):
        return layer.self_attn_layer_norm

    def heads(self, attention, which, normed, places):
        made = getattr(attention, f"{which}_proj")(normed)
        return made.unflatten(-1, (-1, attention.head_dim))[0].transpose(0, 1)

    def fed(self, layer, hidden, mixed):
        hidden = hidden + layer.self_attn.out_proj(mixed)
        return hidden + layer.fc2(layer.fc1(layer.final_layer_norm(hidden)).relu())

    def logits(self, hidden):
        return self.head(self.decoder.final_layer_norm(hidden))[0, -1]


def plain_of(model):
    return (PlainOpt if model.config.model_type == "opt" else Plain)(model)


def watched(model, plain):
    """Return what will have entered the layers that decide, of single tokens, by layer."""
    entered = {layer: [] for layer in DECIDE}
    for number in DECIDE:

        def note(module, given, found=entered[number]):
            if given[0].shape[1] == 1:
                found.append(given[0])

        plain.norm(model.get_decoder().layers[number]).register_forward_pre_hook(note)
    return entered


@pytest.mark.parametrize(
    ("family", "gamma"),
    [
        *(("llama", gamma) for gamma in (0.9, 0.8, 0.67)),
        # Queries with biases, and with norms, and without RoPE: of none does gamma know.
        *(("qwen2", 0.9), ("qwen3", 0.67), ("opt", 0.8)),
    ],
)
def test_the_papers_rule_moves_its_candidates_and_nothing_else(family, gamma):
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    plain, seen = plain_of(model), Counter()
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding=f"swap:{gamma}") as pruning:
        cache = read(model, pruning)
        entered = watched(model, plain)
        before = pruning.decoding_of(cache)
        assert before.active == tuple(tuple(one.tolist()) for one in pruning.read_of(cache).kept)
        for step, token in enumerate(FED[0]):
            feed(model, cache, token.view(1, 1))
            after, length = pruning.decoding_of(cache), TOKENS + step + 1
            counts = [a - b for a, b in zip(after.swaps, before.swaps, strict=True)]
            for number in range(2 if step >= WINDOW else 0):
                places = torch.arange(length)
                if number:
                    places = positions(after.active[0], length)
                wanted = plain.candidates(
                    number,
                    torch.cat(entered[DECIDE[number]][-WINDOW:], 1),
                    cache.layers[DECIDE[number]].keys[0],
                    places,
                    len(before.active[number]),
                    length,
                )
                had = set(before.active[number])
                moves = len(wanted & had) / len(wanted) < gamma
                assert set(after.active[number]) == (wanted if moves else had)
                assert counts[number] == moves
                # Candidates that are there, that are left where they are, and that move.
                seen[number, "moves" if moves else "differs" if wanted != had else "same"] += 1
            before = after
        assert after.steps == FED.shape[1]
    assert seen[0, "moves"] > 1
    assert seen[1, "moves"] > 1
    assert seen[0, "same"] + seen[0, "differs"] > 1
    if gamma == 0.8:
        # Five of six.
        assert seen[0, "differs"] > 1


@pytest.mark.parametrize(
    ("family", "chunk"),
    [("llama", 1024), *zip(FAMILIES, (100, 100, 1024, 100, 1024), strict=True)],
)
def test_rows_of_a_block_are_those_of_a_direct_computation_and_return_as_they_were(family, chunk):
    """Every row of every band at every step, and the logits that come of them."""
    model = TinyModel(family, "mha" if family == "opt" else "gqa", layers=5).build()
    plain, tally, apart = plain_of(model), Counter(), 0.0
    with hillinfer.prune(
        model, SCHEDULE, ranker="paper", decoding="swap", chunk_tokens=chunk
    ) as pruning:
        cache = read(model, pruning)
        before, rows = pruning.decoding_of(cache), rows_of(cache)
        known = [{}, {}]
        for band, own, active in zip(BANDS, known, before.active, strict=True):
            remember(own, band, rows, active, positions(active, TOKENS))
        places = positions(before.active[0], TOKENS)
        out, _ = plain.through(BANDS[0], plain.boundary[:, places], places)
        entering = {block: out[:, places // 64 == block] for block in before.active[0]}
        for step, token in enumerate(FED[0, :20]):
            logits = feed(model, cache, token.view(1, 1))[0]
            after, own, length = pruning.decoding_of(cache), rows_of(cache), TOKENS + step
            assert lengths(cache)[:2] == [length + 1] * 2
            held = {number: (keys[:, :-1], values[:, :-1]) for number, (keys, values) in
                    enumerate(own)}  # fmt: skip
            for number, band in enumerate(BANDS):
                had, has = set(before.active[number]), set(after.active[number])
                places = positions(after.active[number], length)
                assert lengths(cache)[band.start] == len(places) + 1
                fresh = sorted(has - known[number].keys())
                tally["computed", number] += len(fresh)
                tally["put back"] += len(has - had - set(fresh))
                tally["rows"] += 64 * len(has - had) * len(band)
                was = positions(before.active[number], length)
                for layer in band:
                    stayed = torch.isin(places, was)
                    for now, then in zip(held[layer], rows[layer], strict=True):
                        kept = torch.isin(was, places)
                        assert torch.equal(now[:, stayed], then[:, kept])
                    # What was there before has its rows, bit for bit.
                    for block in has - set(fresh):
                        mine = [one[:, places // 64 == block][:, :60] for one in held[layer]]
                        theirs = [one[:, :60] for one in known[number][block][layer]]
                        assert same([mine], [theirs])
                if fresh:
                    new = torch.isin(places // 64, torch.tensor(fresh))
                    others = {layer: [one[:, ~new] for one in held[layer]] for layer in band}
                    states = plain.boundary[:, places[new]]
                    if number:
                        states = torch.cat([entering[block] for block in fresh], 1)
                    given = band, states, places[new], places[~new], others
                    out, made = plain.through(*given)
                    _, wrong = plain.through(*given, sees_all=True)
                    for layer, expected, other in zip(band, made, wrong, strict=True):
                        found = [one[:, new] for one in held[layer]]
                        for one, two in zip(found, expected, strict=True):
                            torch.testing.assert_close(one, two, atol=3e-4, rtol=3e-4)
                        apart = max(apart, float((found[1] - other[1]).abs().max()))
                    if not number:
                        entering |= dict(zip(fresh, out.split(64, 1), strict=True))
                remember(known[number], band, held, fresh, places)
            place, every = torch.tensor([length]), [(range(2), torch.arange(length))]
            every += [
                (band, positions(active, length))
                for band, active in zip(BANDS, after.active, strict=True)
            ]
            state = plain.embedded(token.view(1, 1), place)
            for layers, places in every:
                state, _ = plain.through(layers, state, place, places, held)
            torch.testing.assert_close(logits, plain.logits(state), atol=5e-4, rtol=5e-4)
            before, rows = after, own
    assert after.computed == tally["computed", 0] + tally["computed", 1]
    assert after.put_back == tally["put back"]
    assert after.entered_rows == tally["rows"]
    assert min(tally["computed", 0], tally["computed", 1], tally["put back"]) > 0
    assert after.aside_bytes > 0
    assert after.swapping_seconds > 0
    # What stands behind a block changes its rows where it is seen.
    assert apart > 0.01


def remember(known, band, rows, blocks, places):
    for block in blocks:
        inside = places // 64 == block
        known[block] = {layer: [one[:, inside] for one in rows[layer]] for layer in band}


@pytest.mark.parametrize(
    ("family", "later"),
    [("llama", "anew"), *zip(FAMILIES, ("keep", "anew", "anew", "keep", "anew"), strict=True)],
)
def test_where_nothing_moves_the_bits_are_those_of_keeping(family, later):
    model, found = TinyModel(family, "mha", layers=5).build(), {}
    for decoding in ("keep", "swap:0.01", "swap:1"):
        with hillinfer.prune(
            model, SCHEDULE, ranker="paper", later=later, decoding=decoding
        ) as pruning:
            cache = read(model, pruning)
            logits = feed(model, cache, FED[:, :12])
            found[decoding] = logits, rows_of(cache), pruning.decoding_of(cache)
    assert torch.equal(found["swap:0.01"][0], found["keep"][0])
    assert same(found["swap:0.01"][1], found["keep"][1])
    assert found["keep"][2] is None
    assert found["swap:0.01"][2].swaps == (0, 0)
    assert sum(found["swap:1"][2].swaps) > 0
    assert not torch.equal(found["swap:1"][0], found["keep"][0])


def test_by_default_nothing_moves():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE) as pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        assert pruning.decoding_of(cache) is None
        assert pruning.decoding_of(DynamicCache(config=model.config)) is None


@pytest.mark.parametrize("ranker", ["weights", "token", "recent"])
def test_every_ranker_may_move_blocks(ranker):
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, ranker=ranker, decoding="swap") as pruning:
        cache = read(model, pruning)
        found = feed(model, cache, FED)
        told = pruning.decoding_of(cache)
    assert found.isfinite().all()
    assert told.steps == FED.shape[1]
    # What came last stays what came last.
    assert (sum(told.swaps) > 0) == (ranker != "recent")
    assert told.as_json()["active"] == [[*one] for one in told.active]


# Of the band behind a cut the first call runs a block, the second one the token.
BREAKS = [(0, 2, 1), (0, 2, 2), (0, 3, 1), (0, 3, 2), (0, 4, 1), (1, 4, 1), (1, 4, 2)]


@pytest.fixture(scope="module")
def unbroken():
    """Logits behind each token, and what was told of it, where no step breaks off."""
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        cache, expected, told = read(model, pruning), [], []
        for token in FED[0]:
            expected.append(feed(model, cache, token.view(1, 1)))
            told.append(pruning.decoding_of(cache))
    return expected, told


@pytest.mark.parametrize(("cut", "number", "calls"), BREAKS)
def test_a_step_that_breaks_off_while_blocks_move_moves_none(cut, number, calls, unbroken):
    model, (expected, told) = TINY.build(), unbroken
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        # Where that band alone changes, and has something computed.
        step = next(
            place
            for place, (last, one) in enumerate(pairwise(told), 1)
            if one.swaps[cut] > last.swaps[cut]
            and one.swaps[1 - cut] == last.swaps[1 - cut]
            and one.computed > last.computed
        )
        cache, count = read(model, pruning), 0
        feed(model, cache, FED[:, :step])
        before, known = rows_of(cache), pruning.decoding_of(cache)

        def strike(module, given):
            nonlocal count
            count += 1
            if count == calls:
                raise StruckError

        hook = model.get_decoder().layers[number].mlp.register_forward_pre_hook(strike)
        token = FED[:, step : step + 1]
        with pytest.raises(StruckError):
            feed(model, cache, token)
        assert same(rows_of(cache), before)
        assert pruning.decoding_of(cache) == known
        hook.remove()
        found = feed(model, cache, token)
        assert timeless(pruning.decoding_of(cache)) == timeless(told[step])
        assert torch.equal(found, expected[step])
        assert not same(rows_of(cache), before)


def timeless(told):
    return replace(told, deciding_seconds=0.0, swapping_seconds=0.0)


def test_a_cropped_answer_goes_on_with_what_bands_have():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        told, before = pruning.decoding_of(cache), rows_of(cache)
        cache.crop(-15)
        feed(model, cache, FED[:, 25:26])
        after, length = pruning.decoding_of(cache), TOKENS + 25
        for number, band in enumerate(BANDS):
            places = positions(after.active[number], length)
            was = positions(told.active[number], length)
            assert lengths(cache)[band.start] == len(places) + 1
            for layer in band:
                now, then = cache.layers[layer].keys[0][:, :-1], before[layer][0][:, : len(was)]
                both = torch.isin(places, was), torch.isin(was, places)
                assert torch.equal(now[:, both[0]], then[:, both[1]])
        # A later turn meets what is there.
        feed(model, cache, FED[:, 26:])
        held = lengths(cache)
        with torch.no_grad():
            model(ANSWER, past_key_values=cache, logits_to_keep=1)
        assert lengths(cache) == [one + ANSWER.shape[1] for one in held]
        feed(model, cache, FED)
        assert sum(pruning.decoding_of(cache).swaps) > sum(after.swaps)


def test_blocks_of_a_prompt_that_is_cut_off_move_no_more():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        told, left = pruning.decoding_of(cache), TOKENS - 100
        cut_back(cache, left)
        with torch.no_grad():
            model(ANSWER, past_key_values=cache, logits_to_keep=1)
        feed(model, cache, FED)
        assert pruning.decoding_of(cache) is None
        more = ANSWER.shape[1] + FED.shape[1]
        bands = [int((positions(one, TOKENS) < left).sum()) for one in told.active]
        rows = [left + more, left + more, *[bands[0] + more] * 2, bands[1] + more]
        assert lengths(cache) == rows


@pytest.mark.parametrize("decoding", ["keep", "swap"])
def test_a_turn_that_chooses_anew_forgets_what_moved(decoding):
    model = TINY.build()
    longer = torch.cat([IDS, FED, ANSWER], 1)
    with hillinfer.prune(
        model, SCHEDULE, ranker="paper", later="anew", decoding=decoding
    ) as pruning:
        cache, fresh = read(model, pruning), DynamicCache(config=model.config)
        feed(model, cache, FED)
        found, logits = generated(model, longer, cache, new=10)
        expected, plain = generated(model, longer, fresh, new=10)
        assert found == expected
        torch.testing.assert_close(logits, plain, atol=5e-4, rtol=5e-4)
        if decoding == "swap":
            assert timeless(pruning.decoding_of(cache)) == timeless(pruning.decoding_of(fresh))


def test_what_moved_can_be_read_whole():
    model = TINY.build()
    with torch.no_grad():
        dense = DynamicCache(config=model.config)
        model(torch.cat([IDS, FED], 1), past_key_values=dense, logits_to_keep=1)
    with hillinfer.prune(model, SCHEDULE, ranker="paper", later="anew", decoding="swap") as pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        assert sum(pruning.decoding_of(cache).swaps) > 0
        assert pruning.complete(cache).done == TOKENS + FED.shape[1]
        assert pruning.decoding_of(cache) is None
        assert lengths(cache) == lengths(dense)
        # Up to rounding: decoded tokens are read with all before them, too.
        for one, other in zip(rows_of(cache), rows_of(dense), strict=True):
            torch.testing.assert_close(one[0], other[0], atol=5e-4, rtol=5e-4)


class OneLess(Decoding):
    """A policy of one's own: what bands have, less what nobody wants."""

    def active(self, candidates, active):
        return candidates & active


def test_a_policy_of_ones_own_is_a_class_with_one_method():
    model, rule = TINY.build(), RANKERS["paper"]()
    with Pruning(model, Schedule.parse(SCHEDULE), rule, decoding=OneLess()) as pruning:
        cache = read(model, pruning)
        before = pruning.read_of(cache).tokens
        feed(model, cache, FED)
        told = pruning.decoding_of(cache)
    assert told.computed == told.put_back == 0
    assert all({0, LAST} <= set(one) for one in told.active)
    assert lengths(cache)[2] < before[2] + FED.shape[1]


class Noting(Decoding):
    """Moves nothing, and notes what it might."""

    def __init__(self):
        self.seen = []

    def active(self, candidates, active):
        self.seen.append(sorted(candidates))
        return active


def noting(model, schedule=SCHEDULE):
    """Return a pruning by the paper's rule, and a list that candidates come to."""
    policy = Noting()
    rule = RANKERS["paper"]()
    return Pruning(model, Schedule.parse(schedule), rule, decoding=policy), policy.seen


def test_an_answer_that_is_cropped_begins_anew_with_the_same_queries():
    model = TINY.build()
    pruning, seen = noting(model)
    with pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        first = [*seen]
        cache.crop(-FED.shape[1])
        seen.clear()
        feed(model, cache, FED)
    assert seen == first
    # The twin: candidates follow the queries.
    assert seen[:2] != seen[-2:]


def test_nothing_is_ranked_where_a_band_has_all_blocks():
    model = TINY.build()
    # The first cut keeps 11 blocks of 11, the second one 3.
    pruning, seen = noting(model, "2:100000,4:25%")
    with pruning:
        cache = read(model, pruning)
        feed(model, cache, FED)
        told = pruning.decoding_of(cache)
    assert {len(one) for one in seen} == {3}
    assert len(seen) == told.steps == FED.shape[1]


def test_a_turn_that_breaks_off_leaves_the_queries_that_rank():
    model = TINY.build()
    turn, _ = prompts([50], seed=4)
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        cache, whole = read(model, pruning), read(model, pruning)
        for one in (cache, whole):
            feed(model, one, FED[:, :6])

        def strike(module, given):
            raise StruckError

        hook = model.get_decoder().layers[4].mlp.register_forward_pre_hook(strike)
        with pytest.raises(StruckError), torch.no_grad():
            model(turn, past_key_values=cache)
        hook.remove()
        assert torch.equal(feed(model, cache, FED[:, 6:]), feed(model, whole, FED[:, 6:]))
        assert timeless(pruning.decoding_of(cache)) == timeless(pruning.decoding_of(whole))
        # The twin: what those queries rank by is seen.
        with torch.no_grad():
            model(turn, past_key_values=cache)
        assert not torch.equal(feed(model, cache, FED[:, :1]), feed(model, whole, FED[:, :1]))


@pytest.mark.parametrize("chunks", [[20], [19, 1], [1, 19], [1] * 20])
def test_tokens_of_a_later_prompt_are_no_decoded_ones(chunks):
    model = TINY.build()
    turn, _ = prompts([20], seed=4)
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        cache = read(model, pruning)
        before = pruning.decoding_of(cache)
        with pruning.prompt(TOKENS + 20), torch.no_grad():
            for own in turn.split(chunks, 1):
                model(own, past_key_values=cache, logits_to_keep=1)
        assert pruning.decoding_of(cache) == before
        feed(model, cache, FED[:, :10])
        assert pruning.decoding_of(cache).steps == 10


def struck_between_layers(model, pruning):
    """Break off where a layer of ours does not run, once blocks have moved; return old rows."""
    cache = read(model, pruning)

    def strike(module, given):
        if sum(pruning.decoding_of(cache).swaps):
            raise StruckError

    hook = model.get_decoder().layers[3].register_forward_pre_hook(strike)
    rows = weakref.ref(cache.layers[2].keys)
    with pytest.raises(StruckError):
        feed(model, cache, FED)
    hook.remove()
    return rows, cache


def test_rows_that_moved_go_with_their_cache_wherever_a_pass_ends():
    model = TINY.build()
    with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding="swap") as pruning:
        rows, _ = struck_between_layers(model, pruning)
        del _
        gc.collect()
        assert rows() is None


def test_a_prompt_that_was_cut_after_a_broken_step_keeps_what_bands_have():
    model = TINY.build()
    found = []
    for decoding in ("keep", "swap"):
        with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding=decoding) as pruning:
            cache = read(model, pruning)

            def strike(module, given):
                raise StruckError

            hook = model.get_decoder().layers[4].mlp.register_forward_pre_hook(strike)
            with pytest.raises(StruckError):
                feed(model, cache, FED)
            hook.remove()
            cut_back(cache, TOKENS - 30)
            feed(model, cache, FED[:, :1])
            found.append((lengths(cache), pruning.read_of(cache).tokens))
    assert found[0] == found[1]


# --- refusals ---


class LosesTheLast(Decoding):
    """Forgets the block that answers lie in, too."""

    def active(self, candidates, active):
        return candidates - {LAST}


class WantsMore(Decoding):
    """Wants a block that no prompt has."""

    def active(self, candidates, active):
        return active | {LAST + 1}


@pytest.mark.parametrize("policy", [LosesTheLast(), WantsMore()])
def test_a_policy_that_wants_what_cannot_be_is_refused(policy):
    model = TINY.build()
    rule = RANKERS["paper"]()
    with Pruning(model, Schedule.parse(SCHEDULE), rule, decoding=policy) as pruning:
        cache = read(model, pruning)
        before = rows_of(cache)
        with pytest.raises(SettingsError, match=f"return 0, {LAST} and any of"):
            feed(model, cache, FED)
        assert same(rows_of(cache), before)


def test_several_answers_side_by_side_are_refused_where_blocks_move():
    model = TINY.build()
    for decoding in ("keep", "swap"):
        with hillinfer.prune(model, SCHEDULE, ranker="paper", decoding=decoding) as pruning:
            cache = read(model, pruning)
            feed(model, cache, FED)
            cache.batch_repeat_interleave(2)
            two = FED[:, :1].expand(2, 1)
            if decoding == "keep":
                model(two, past_key_values=cache)
                continue
            with pytest.raises(UnsupportedFeatureError, match="decode one at a time"):
                model(two, past_key_values=cache)


@pytest.mark.parametrize("text", ["swap:0", "swap:1.01", "swap:-1", "swap:nan"])
def test_a_gamma_that_is_none_is_refused(text):
    with pytest.raises(SettingsError, match=r"above 0 and up to 1, such as swap:0\.9"):
        hillinfer.prune(TINY.build(), SCHEDULE, decoding=text)
    assert make_decoding("swap:1").active(frozenset({0}), frozenset({0, 1})) == {0, 1}


@pytest.mark.parametrize("text", ["", "swop", "keep:1", "swap:", "swap:much", "swap:0.5:1"])
def test_an_unknown_way_to_decode_is_refused(text):
    with pytest.raises(SettingsError, match=r"choose one of keep, swap, blocks, enter, or"):
        hillinfer.prune(TINY.build(), SCHEDULE, decoding=text)


def test_the_papers_gamma_is_taken_where_none_is_given():
    some = frozenset(range(10))
    for text in ("swap", f"swap:{PAPER_GAMMA}"):
        way = make_decoding(text)
        assert way.active(some, some - {3} | {11}) == some - {3} | {11}
        assert way.active(some, some - {3, 4} | {11, 12}) == some


def test_a_cache_on_a_drive_selects_by_itself_and_says_so(cold_dir):
    model = TINY.build()
    with hillinfer.attach(model, cold_dir=cold_dir, alpha=0.2) as hill:
        with (
            hillinfer.prune(model, SCHEDULE, decoding="swap"),
            pytest.raises(UnsupportedFeatureError, match='leave decoding="keep", where alpha'),
        ):
            generated(model, IDS, hill.new_cache())
        cache = hill.new_cache()
        with hillinfer.prune(model, SCHEDULE, decoding="keep"):
            generated(model, IDS, cache)
        with (
            hillinfer.prune(model, SCHEDULE, decoding="swap"),
            pytest.raises(UnsupportedFeatureError, match='leave decoding="keep", where alpha'),
        ):
            feed(model, cache, FED)
