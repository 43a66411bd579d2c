# SPDX-License-Identifier: Apache-2.0
"""Predicted queries: made as each family makes its own, and used where they should be."""

import copy

import pytest
import torch
from generation_runs import attached, attached_with, bits, run
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hillinfer.engine.runtime import Runtime
from hillinfer.errors import SettingsError
from hillinfer.hf.attention import SharedNorm, is_rms_norm
from hillinfer.hf.hooks import FIRST_PREDICTED, predictor_of, with_named_query
from hillinfer.settings import QuerySource, Settings


def own_queries(model, ids):
    """Return, for each layer, its input, its query and its factor, of one forward pass."""
    seen = []

    def record(module, query, key, value, mask, scaling=None, **kwargs):
        seen.append((query, scaling))
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)

    inputs = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(
                (args[0] if args else kwargs["hidden_states"], kwargs.get("position_embeddings"))
            ),
            with_kwargs=True,
        )
        for layer in model.get_decoder().layers
    ]
    AttentionInterface.register("recorded", record)
    model.set_attn_implementation("recorded")
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return [(*own, *made) for own, made in zip(inputs, seen, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_of_a_layers_own_input_the_very_query_is_made(family, dtype):
    heads = "mha" if family == "opt" else "gqa"
    model = TinyModel(family, heads, dtype, layers=3).build()
    predictor = predictor_of(family, QuerySource.PREDICTED)
    ids, _ = prompts([20])
    layers = model.get_decoder().layers
    for layer, (hidden, rotary, query, scaling) in zip(
        layers, own_queries(model, ids), strict=True
    ):
        with torch.no_grad():
            made = predictor.predict(layer, hidden, rotary)
        assert torch.equal(made, query)
        assert predictor.scaling(layer) == scaling
        # The twin: of another layer's weights it is another query.
        other = layers[0] if layer is not layers[0] else layers[1]
        with torch.no_grad():
            assert not torch.equal(predictor.predict(other, hidden, rotary), query)


def test_a_norm_that_somebody_changed_is_called():
    """And one as transformers made it has the bits of a call."""
    model = TinyModel(layers=3).build()
    layer, predictor = model.model.layers[1], predictor_of("llama", QuerySource.PREDICTED)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, 1, model.config.hidden_size, generator=generator)
    hidden *= 10 ** torch.linspace(-3, 3, 50)[:, None, None]
    with torch.no_grad():
        layer.input_layernorm.weight.uniform_(-2, 2, generator=generator)
        expected = layer.input_layernorm(hidden)
        assert torch.equal(predictor.enter(layer, hidden), expected)
        hook = layer.input_layernorm.register_forward_hook(lambda *given: given[2] + 1)
        assert torch.equal(predictor.enter(layer, hidden), expected + 1)
        hook.remove()
        layer.input_layernorm.forward = lambda states: states
        assert torch.equal(predictor.enter(layer, hidden), hidden)


def spoiled(module, given):
    given[0].detach().add_(1)


class Announcing:
    """A layer's last hook, which asks its norm for what the next one would give."""

    def __init__(self, layers):
        self.layers, self.norm = layers, SharedNorm.between(*layers[:2])
        self.handle = layers[0].register_forward_pre_hook(self)

    def __call__(self, module, given):
        self.entered = self.norm.entered(given[0], self.layers[1], module, self)


def normed(layers, hidden):
    """Return what a layer's norm gives of states that come through its hooks."""
    for hook in layers[0]._forward_pre_hooks.values():
        hook(layers[0], (hidden,))
    return layers[0].input_layernorm(hidden)


def test_norms_that_divide_alike_divide_once():
    """Both have the bits of a norm by itself, also where somebody changed what one is to divide."""
    layers = TinyModel(layers=3).build().model.layers
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in layers:
            layer.input_layernorm.weight.uniform_(-2, 2, generator=generator)
        hidden = torch.randn(1, 1, layers[0].hidden_size, generator=generator)
        plain, following = (copy.deepcopy(one.input_layernorm) for one in layers[:2])
        own = Announcing(layers)
        assert torch.equal(normed(layers, hidden), plain(hidden))
        assert torch.equal(own.entered, following(hidden))
        # The twin: with other weights it is another norm.
        assert not torch.equal(own.entered, plain(hidden))
        # What was divided is taken once, and of these states alone.
        own(layers[0], (hidden,))
        for other in (hidden + 1, hidden):
            assert torch.equal(layers[0].input_layernorm(other), plain(other))
        own(layers[0], (hidden,))
        hidden += 1
        assert torch.equal(layers[0].input_layernorm(hidden), plain(hidden))
        # Whoever comes behind may change them unseen.
        later = layers[0].register_forward_pre_hook(spoiled)
        assert torch.equal(normed(layers, hidden), plain(hidden))
        assert own.entered is None
        later.remove()
        # A copy is a norm like any other.
        copied = copy.deepcopy(layers[0].input_layernorm)
        assert not isinstance(copied.forward, SharedNorm)
        assert is_rms_norm(copied)
        own.norm.remove()
        assert "forward" not in vars(layers[0].input_layernorm)


def test_nothing_is_shared_with_what_divides_by_something_else(monkeypatch):
    layers = TinyModel(layers=4).build().model.layers
    layers[1].input_layernorm.variance_epsilon *= 2
    assert SharedNorm.between(*layers[:2]) is None
    layers[2].input_layernorm.forward = lambda states: states
    assert SharedNorm.between(*layers[2:]) is None
    # Wrapped twice, and left in either order.
    for order in ((0, 1), (1, 0)):
        norm = layers[3].input_layernorm
        both = [SharedNorm(norm), SharedNorm(norm)]
        for place in order:
            both[place].remove()
        assert "forward" not in vars(norm)
    norm = layers[0].input_layernorm
    shared = SharedNorm(norm)
    # A class that somebody changes is theirs, before and after.
    monkeypatch.setattr(type(norm), "forward", lambda self, states: states + 1)
    assert not is_rms_norm(norm)
    states = torch.ones(1, 1, layers[0].hidden_size)
    assert torch.equal(norm(states), states + 1)
    shared.remove()


def without_part(model, number):
    """Let a layer add nothing to what comes through it."""
    layer = model.get_decoder().layers[number]
    silenced = [
        linear
        for name, linear in layer.named_modules()
        if name.split(".")[-1] in ("o_proj", "out_proj", "down_proj", "fc2")
    ]
    assert len(silenced) == 2
    with torch.no_grad():
        for linear in silenced:
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_behind_a_layer_that_adds_nothing_the_prediction_is_the_query(family, cold_dir):
    """Layers have weights of their own, so a query of another layer or norm selects otherwise."""
    heads = "mha" if family == "opt" else "gqa"
    model = TinyModel(family, heads, layers=3).build()
    # The first segment is full, and has its statistics; of the second all tokens are kept.
    ids, _ = prompts([1026])
    settings = {"alpha": 0.1, "rule": "raw_sum", "shadow": "int8", "kept_recent": 16}

    def logits_with(query):
        with attached(model, cold_dir, query=query, **settings) as hill:
            cache = hill.new_cache()
            found = bits(run(model, cache, ids, new_tokens=4, prefill_chunk_size=256))
            cache.close()
        return found

    # The twin: what layer 1 adds makes the query of layer 2 another.
    assert not torch.equal(logits_with("predicted"), logits_with("true"))
    without_part(model, 1)
    assert torch.equal(logits_with("predicted"), logits_with("true"))


def test_only_layers_behind_the_second_are_announced(cold_dir):
    model = TinyModel("llama", layers=5).build()
    ids, mask = prompts([200])
    announced, given = [], {"query": "predicted", "alpha": 0.2, "dram_budget": "32MiB"}

    class Noting(Runtime):
        def announce(self, layer, *rest):
            announced.append(layer)
            super().announce(layer, *rest)

    with attached_with(model, cold_dir, {"open_runtime": Noting}, **given) as hill:
        cache = hill.new_cache()
        run(model, cache, ids, mask, 3)
        cache.close()
    # Three tokens take two forward passes after the prompt's.
    assert announced == list(range(FIRST_PREDICTED, 5)) * 2


def test_a_true_query_is_not_announced_and_nothing_stays_behind(cold_dir):
    model = TinyModel("llama", layers=4).build()
    with attached(model, cold_dir, query="true"):
        assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    with attached(model, cold_dir, query="predicted"):
        assert any(layer._forward_pre_hooks for layer in model.model.layers)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_a_family_without_a_predictor_takes_true_queries_or_says_so():
    assert predictor_of("gpt_neox", QuerySource.AUTO) is None
    assert predictor_of("gpt_neox", QuerySource.TRUE) is None
    with pytest.raises(SettingsError, match="gpt_neox"):
        predictor_of("gpt_neox", QuerySource.PREDICTED)


@pytest.mark.parametrize(
    ("family", "asked", "query", "blocks"),
    [
        ("llama", "auto", QuerySource.PREDICTED, 3),
        ("opt", "auto", QuerySource.PREDICTED, 3),
        ("qwen3", "auto", QuerySource.TRUE, 0),
        ("llama", "true", QuerySource.TRUE, 0),
        ("gpt_neox", "auto", QuerySource.TRUE, 0),
    ],
)
def test_memory_to_land_in_is_taken_only_where_queries_are_predicted(family, asked, query, blocks):
    named = with_named_query(Settings().changed(query=asked, prefetch_blocks=3), family)
    assert (named.query, named.prefetch_blocks) == (query, blocks)


def test_a_forward_pass_that_breaks_off_leaves_nothing_announced(cold_dir):
    model = TinyModel("llama", layers=4).build()
    ids, _ = prompts([200])
    settings = {"query": "predicted", "alpha": 0.2, "kept_recent": 4}
    with attached(model, cold_dir, **settings) as hill, torch.no_grad():
        cache = hill.new_cache(300)
        model(ids, past_key_values=cache)
        expected = model(torch.tensor([[5]]), past_key_values=cache.fork()).logits

        def fail(*_):
            raise KeyboardInterrupt

        # Layer 3 is announced when layer 2 begins, and never asks.
        hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(torch.tensor([[5]]), past_key_values=cache)
        hook.remove()
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=cache).logits, expected)
        runtime = cache.engine.runtime
        announced = runtime.parts.pipeline.announced
        assert all(announced(layer, cache.sequences[0]) is None for layer in range(4))
        runtime.statistics()
        assert {state.value for state in runtime.prefetch.landing.states()} == {"free"}
        cache.close()
