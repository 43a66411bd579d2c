# SPDX-License-Identifier: Apache-2.0
"""Dropped tokens are those of the formulas, and what is left answers as a mask would."""

import math
from contextlib import contextmanager

import pytest
import torch
from stored_document import TOKENS, logits, stored_document
from transformers import AttentionInterface, DynamicCache

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.forms.dropped import (
    DROPPERS,
    DroppedForm,
    LayerQueries,
    kept_positions,
    kept_tokens,
    observed_queries,
)
from hillinfer.forms.form import OpenedForm
from hillinfer.forms.table import make_form
from hillinfer.generate.answering import Generation
from hillinfer.generate.tokens import Sampling
from hillinfer.store.store import Store

QUESTION = [5, 9, 2, 31, 7, 7, 40]


@pytest.fixture(scope="module")
def precise(tmp_path_factory):
    """A document of a model in FP32, whose grouped queries share KV heads."""
    place = tmp_path_factory.mktemp("precise") / "store"
    Store.create(place, 64 << 20)
    with Store(place) as store:
        yield stored_document(store, "qwen3", torch.float32)


def whole_cache(document):
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(document.states.layers):
        cache.update(keys[None].clone(), values[None].clone(), layer)
    return cache


@contextmanager
def masked(model, positions):
    """Let a model's heads see only some positions of the document, each its own."""
    seen = []
    for own in positions:
        mask = torch.zeros(len(own), TOKENS, dtype=torch.bool)
        seen.append(mask.scatter(1, own, True))

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        group = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(group, 1) for one in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        tokens, length = scores.shape[-2:]
        causal = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        allowed = causal.expand(query.shape[1], -1, -1).clone()
        allowed[..., :TOKENS] &= seen[module.layer_idx].repeat_interleave(group, 0)[:, None]
        scores = scores.masked_fill(~allowed, -math.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("masked_document", attend)
    model.set_attn_implementation("masked_document")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("dropper", DROPPERS)
@pytest.mark.parametrize("kept", [0.2, 0.75])
def test_a_dropped_form_answers_as_a_mask_over_all_rows_would(precise, dropper, kept):
    model, form = precise.model, DroppedForm(dropper, kept)
    positions = form.positions(model, precise.states)
    found = logits(model, form.make(model, precise.states).open(), QUESTION)
    with masked(model, positions):
        expected = logits(model, OpenedForm(whole_cache(precise)), QUESTION)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)
    # The twin: one position of one head is another.
    missing = next(at for at in range(TOKENS) if at not in positions[0][0].tolist())
    positions[0][0, len(positions[0][0]) // 2] = missing
    with masked(model, positions):
        other = logits(model, OpenedForm(whole_cache(precise)), QUESTION)
    assert not torch.allclose(found, other, rtol=1e-4, atol=2e-4)


def test_all_kept_is_the_whole_document(precise):
    for dropper in DROPPERS:
        opened = DroppedForm(dropper, 1.0).make(precise.model, precise.states).open()
        expected = make_form("held").make(precise.model, precise.states).open()
        assert torch.equal(
            logits(precise.model, opened, QUESTION), logits(precise.model, expected, QUESTION)
        )


def test_an_answer_goes_on_at_the_documents_positions(precise):
    """Token by token, in one chunk, and by `generate`, with the length of the whole document."""
    model = precise.model
    made = make_form("keydiff-0.5").make(model, precise.states)
    answers = []
    for chunk in (1, 100):
        generation = Generation(model, made.open().cache, chunk)
        generation.read(QUESTION)
        answers.append(list(generation.decode(Sampling(), 8, frozenset())))
        assert generation.cache.get_seq_length() == TOKENS + len(QUESTION) + 7
    opened = made.open()
    ids = torch.tensor([[*precise.ids, *QUESTION]])
    generated = model.generate(
        ids, past_key_values=opened.cache, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    answers.append(generated[0, ids.shape[1] :].tolist())
    assert answers[0] == answers[1] == answers[2]


def test_positions_of_the_shortened_cache_would_be_seen(precise):
    made = make_form("keydiff-0.5").make(precise.model, precise.states)
    right = logits(precise.model, made.open(), QUESTION)
    short = DynamicCache()
    for layer, own in enumerate(made.open().cache.layers):
        short.update(own.keys, own.values, layer)
    assert not torch.allclose(right, logits(precise.model, OpenedForm(short), QUESTION), atol=1e-2)


def test_a_fork_goes_on_by_itself_and_crops_do_not_cut_the_document(precise):
    opened = make_form("knorm-0.5").make(precise.model, precise.states).open()
    generation = Generation(precise.model, opened.cache)
    generation.read(QUESTION)
    fork = generation.fork()
    fork.read(QUESTION)
    assert (fork.cache.get_seq_length(), opened.cache.get_seq_length()) == (270, 263)
    opened.cache.crop(-7)
    assert opened.cache.get_seq_length() == TOKENS
    with pytest.raises(CacheUseError, match=r"of which 128 tokens were dropped; 0 tokens came"):
        opened.cache.crop(-1)
    opened.cache.reset()
    assert opened.cache.get_seq_length() == 0


def test_short_keys_are_kept_by_knorm_and_odd_ones_by_keydiff(precise):
    for layer, own in enumerate(DroppedForm("knorm", 0.5).positions(precise.model, precise.states)):
        keys = precise.states.layers[layer][0]
        for head, positions in enumerate(own.tolist()):
            norms = [math.sqrt(sum(float(x) ** 2 for x in key)) for key in keys[head].double()]
            expected = sorted(range(TOKENS), key=lambda at: norms[at])[:128]
            assert positions == sorted(expected)
    own = DroppedForm("keydiff", 0.25).positions(precise.model, precise.states)[1]
    keys = precise.states.layers[1][0].double()
    for head, positions in enumerate(own.tolist()):
        units = keys[head] / keys[head].norm(dim=-1, keepdim=True)
        likeness = (units @ units.mean(0)).tolist()
        expected = sorted(range(TOKENS), key=lambda at: likeness[at])[:64]
        assert positions == sorted(expected)


def test_snapkv_keeps_what_the_models_own_weights_of_the_last_tokens_are_largest_of(precise):
    model, window = precise.model, 64
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = model(torch.tensor([precise.ids]), output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    own = DroppedForm("snapkv", 0.5).positions(model, precise.states)
    for layer, weights in enumerate(output.attentions):
        mean = weights[0, :, -window:, :-window].mean(1)
        padded = torch.nn.functional.pad(mean, (2, 2))
        smooth = sum(padded[:, at : at + TOKENS - window] for at in range(5)) / 5
        group = len(smooth) // len(own[layer])
        for head, positions in enumerate(own[layer].tolist()):
            scores = smooth[head * group : (head + 1) * group].mean(0).tolist()
            best = sorted(range(TOKENS - window), key=lambda at: -scores[at])
            assert positions[-window:] == [*range(TOKENS - window, TOKENS)]
            # Rows were rounded to FP16, so neighbours in rank may change places.
            assert len({*positions[:-window]} & {*best[:64]}) >= 62


def test_expected_attention_is_what_drawn_queries_give_on_average(precise):
    """Weights of queries drawn with the document's mean and covariance, at one turned position."""
    model, states = precise.model, precise.states

    class OneComes(DROPPERS["expected"]):
        coming = 1

    dropper = OneComes()
    queries = observed_queries(model, states, TOKENS)[0]
    keys, values = states.layers[0]

    def turn(positions):
        cosines, sines = model.model.rotary_emb(keys, positions[None])
        return cosines[0], sines[0]

    scores = dropper.score(keys, values, queries, turn)
    assert scores[:, :4].min() > scores[:, 4:].max()
    plain = queries.plain[:, 4:].double()
    generator = torch.Generator().manual_seed(0)
    cosines, sines = turn(torch.tensor([TOKENS]))
    head, group = 1, len(plain) // len(keys)
    products = []
    for own in plain[head * group : (head + 1) * group]:
        apart = own - own.mean(0)
        root = torch.linalg.cholesky(apart.T @ apart / len(own) + 1e-9 * torch.eye(own.shape[1]))
        drawn = (
            own.mean(0) + torch.randn(40_000, own.shape[1], generator=generator).double() @ root.T
        )
        first, second = drawn.chunk(2, -1)
        turned = drawn * cosines + torch.cat((-second, first), -1) * sines
        exponents = turned @ keys[head, 4:].double().T / math.sqrt(own.shape[1])
        means = exponents.exp().mean(0)
        products.append(means / means.sum())
    expected = torch.stack(products).mean(0) * values[head, 4:].double().norm(dim=-1)
    close = torch.corrcoef(torch.stack((expected.log(), scores[head, 4:].double().log())))[0, 1]
    assert float(close) > 0.98


@pytest.mark.parametrize("dropper", ["expected", "snapkv"])
def test_products_beyond_fp16_are_those_of_fp32(dropper):
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn((heads, TOKENS, 64), generator=generator) for heads in (2, 2, 4)
    )
    # As of a model with biases: each product has 67,600 in it, which is more than FP16 has.
    keys[..., 0] = queries[..., 0] = 260.0
    keys, values, queries = (one.half() for one in (keys, values, queries))
    observed = queries[:, -DROPPERS[dropper].observed :]

    def turn(positions):
        return torch.ones(len(positions), 64), torch.zeros(len(positions), 64)

    def kept(keys, values, observed):
        scores = DROPPERS[dropper]().score(keys, values, LayerQueries(observed, observed), turn)
        own = kept_positions(scores, 160).tolist()
        return {(head, at) for head, positions in enumerate(own) for at in positions}

    found = kept(keys, values, observed)
    # Weights are FP16, so neighbours in rank may change places.
    assert len(found & kept(keys.float(), values.float(), observed.float())) >= 314
    # The twin: of other tokens others are kept.
    assert len(found & kept(keys.flip(1), values.flip(1), observed)) < 300


def test_how_many_are_kept_is_as_kvpress_counts():
    # Which computes 1 − ratio in floating point and truncates.
    assert [kept_tokens(1000, kept) for kept in (0.1, 0.2, 0.5, 0.9, 1.0)] == [
        max(1, int(1000 * (1 - ratio))) for ratio in (0.9, 0.8, 0.5, 1 - 0.9, 0.0)
    ]
    assert kept_tokens(3, 0.01) == 1
    assert kept_positions(torch.tensor([[1.0, 5.0, 3.0, 4.0]]), 2).tolist() == [[1, 3]]


def test_queries_of_a_model_without_rotary_positions_are_refused(tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        opt = stored_document(store, "opt", torch.float32)
        with pytest.raises(UnsupportedFeatureError, match="drop tokens by knorm or keydiff"):
            make_form("snapkv-0.5").make(opt.model, opt.states)
        opened = make_form("knorm-0.5").make(opt.model, opt.states).open()
        assert logits(opt.model, opened, QUESTION).isfinite().all()
