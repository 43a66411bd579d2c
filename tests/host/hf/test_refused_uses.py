# SPDX-License-Identifier: Apache-2.0
"""Ways of using a model that would give wrong answers are refused before a token comes out."""

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, attached, bits, logits, ordinary, run
from tiny_folder import character_tokenizer
from tiny_models import TinyModel, prompts

from hillinfer.errors import CacheUseError, UnsupportedFeatureError
from hillinfer.hf.attention import attention, refuse_arguments

TINY = TinyModel()
IDS, _ = prompts([40])


def refused(message, use, cold_dir, error=UnsupportedFeatureError, model=None):
    """Use a model on a new cache and expect a refusal that stored nothing."""
    model = model or TINY.build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(error, match=message):
            use(model, cache)
        assert cache.statistics().kv_bytes == 0
        cache.close()


# --- generate ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": TinyModel(heads="mha")},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
    ],
    ids=["assistant model", "prompt lookup", "early exit"],
)
def test_assisted_decoding(options, cold_dir):
    if "assistant_model" in options:
        options = {"assistant_model": options["assistant_model"].build()}
    refused(
        r"assisted and prompt-lookup decoding .*without assistant_model",
        lambda model, cache: run(model, cache, IDS, prefill_chunk_size=None, **options),
        cold_dir,
    )


def test_attention_weights(cold_dir):
    refused(
        r"output_attentions=True.*detach HillInfer",
        lambda model, cache: run(model, cache, IDS, output_attentions=True),
        cold_dir,
    )


def test_attention_weights_asked_for_in_the_config(cold_dir):
    model = TINY.build()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    refused(
        r"output_attentions=True.*detach HillInfer",
        lambda model, cache: model(IDS, past_key_values=cache),
        cold_dir,
        model=model,
    )


def test_embeddings_in_place_of_ids(cold_dir):
    def use(model, cache):
        embeddings = model.model.embed_tokens(IDS)
        model.generate(inputs_embeds=embeddings, past_key_values=cache, max_new_tokens=2)

    refused(r"inputs_embeds.*pass input_ids", use, cold_dir)


def test_generating_without_a_cache_but_with_one(cold_dir):
    refused(
        r"use_cache=False.*leave",
        lambda model, cache: run(model, cache, IDS, use_cache=False),
        cold_dir,
    )


def test_padding_on_the_right(cold_dir):
    mask = torch.ones_like(IDS)
    mask[:, -3:] = 0
    refused(
        r"padding after tokens.*padding_side = 'left'",
        lambda model, cache: run(model, cache, IDS, mask),
        cold_dir,
    )


def test_a_hole_in_the_mask(cold_dir):
    mask = torch.ones_like(IDS)
    mask[:, 20] = 0
    refused(
        r"padding after tokens.*padding_side = 'left'",
        lambda model, cache: model(IDS, attention_mask=mask, past_key_values=cache),
        cold_dir,
    )


# --- forward passes ------------------------------------------------------------------------


def test_a_mask_of_four_dimensions(cold_dir):
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    refused(
        r"mask of 4 dimensions.*two-dimensional mask",
        lambda model, cache: model(IDS, attention_mask=mask, past_key_values=cache),
        cold_dir,
    )


def test_a_mask_of_another_length(cold_dir):
    refused(
        r"mask has shape \(1, 39\).*need \(1, 40\)",
        lambda model, cache: model(IDS, attention_mask=IDS[:, 1:] > 0, past_key_values=cache),
        cold_dir,
        CacheUseError,
    )


def test_training_mode(cold_dir):
    refused(
        r"training mode.*model\.eval\(\)",
        lambda model, cache: run(model, cache, IDS),
        cold_dir,
        model=TINY.build().train(),
    )


def test_gradient_checkpointing(cold_dir):
    model = TINY.build().train()
    model.activation_checkpointing_enable()
    refused(
        r"training mode.*model\.eval\(\)",
        lambda model, cache: model(IDS, past_key_values=cache),
        cold_dir,
        model=model,
    )


def test_gradients(cold_dir):
    refused(
        r"gradients.*torch\.no_grad\(\)",
        lambda model, cache: model(IDS, past_key_values=cache),
        cold_dir,
    )


# --- a used cache --------------------------------------------------------------------------


def used_again(message, cold_dir, use, ids=IDS, mask=None):
    model = TINY.build()
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        answer = run(model, cache, ids, mask).sequences
        with pytest.raises(CacheUseError, match=message):
            use(model, cache, answer)
        # Refused, not spoilt: the conversation may go on.
        longer = torch.cat([answer, ids[:, :5].clamp(min=1)], dim=1)
        longer_mask = None
        if mask is not None:
            longer_mask = torch.cat([mask, mask.new_ones(len(ids), 15)], dim=1)
        found = run(model, cache, longer, longer_mask)
        cache.close()
    assert torch.equal(found.sequences, ordinary(model, longer, longer_mask).sequences)


def test_another_prompt(cold_dir):
    other, _ = prompts([80], seed=3)
    used_again(
        r"does not continue.*new cache for another prompt.*whole conversation",
        cold_dir,
        lambda model, cache, answer: run(model, cache, other),
    )


def test_a_prompt_that_differs_in_one_early_token(cold_dir):
    def use(model, cache, answer):
        changed = torch.cat([answer, IDS[:, :5]], dim=1)
        changed[0, 7] = changed[0, 7] % 60 + 1
        run(model, cache, changed)

    used_again(r"does not continue", cold_dir, use)


def test_a_prompt_without_anything_new(cold_dir):
    used_again(
        r"does not continue",
        cold_dir,
        lambda model, cache, answer: run(model, cache, answer[:, :-1]),
    )


def test_a_prompt_padded_otherwise(cold_dir):
    ids, mask = prompts([40, 20])

    def use(model, cache, answer):
        longer = torch.cat([answer, answer[:, :3]], dim=1)
        shifted = torch.ones_like(longer)
        shifted[1, :18] = 0
        run(model, cache, longer, shifted)

    used_again(r"does not continue.*sequence 1", cold_dir, use, ids, mask)


@pytest.mark.parametrize("batch", [2, 3])
def test_another_batch_size(batch, cold_dir):
    def use(model, cache, answer):
        longer = torch.cat([answer, IDS[:, :5]], dim=1)
        with torch.no_grad():
            model(longer[:, -5:].repeat(batch, 1), past_key_values=cache)

    used_again(rf"holds 1 sequences but the forward pass has {batch}", cold_dir, use)


def test_another_batch_size_in_generate(cold_dir):
    def use(model, cache, answer):
        run(model, cache, torch.cat([answer, IDS[:, :5]], dim=1).repeat(2, 1))

    used_again(r"holds 1 sequences but 2 were given: use a new cache", cold_dir, use)


def test_new_ids_with_a_mask_of_the_wrong_length(cold_dir):
    def use(model, cache, answer):
        run(model, cache, IDS[:, :5], torch.ones(1, 30, dtype=torch.long))

    used_again(
        r"5 new tokens on 49 cached ones need an attention mask of 54, not 30", cold_dir, use
    )


# --- arguments of the attention function ---------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "feature"),
    {
        "softcap": "soft-capped attention scores",
        "s_aux": "attention sinks with a learned logit",
        "sinks": "attention sinks with a learned logit",
        "position_bias": "a learned position bias",
        "indices": "sparse attention with its own indices",
        "block_indices": "sparse attention with its own indices",
        "anything_new": "the attention argument 'anything_new'",
    }.items(),
)
def test_arguments_that_change_attention(argument, feature, cold_dir):
    def use(model, cache):
        """Let one layer pass the argument on, as a model that has the feature does."""
        layer = model.model.layers[1].self_attn
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {argument: 30.0}), with_kwargs=True
        )
        run(model, cache, IDS)

    model = TINY.build()
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(UnsupportedFeatureError, match=rf"{feature}.*ordinary cache"):
            use(model, cache)
        cache.close()


@pytest.mark.parametrize(
    "argument", ["dropout", "position_ids", "use_cache", "softcap", "s_aux", "anything_new"]
)
def test_arguments_that_are_none_are_harmless(argument):
    refuse_arguments({argument: None})


def test_windows_given_to_the_attention_function():
    with pytest.raises(UnsupportedFeatureError, match=r"sliding_window=128.*ordinary cache"):
        refuse_arguments({"sliding_window": 128})


def test_attention_to_later_tokens():
    with pytest.raises(UnsupportedFeatureError, match=r"is_causal=False.*ordinary cache"):
        refuse_arguments({"is_causal": False})


def test_arguments_of_other_caches_are_none_of_our_business():
    """A key that no cache of ours returned goes to SDPA, whatever comes with it."""
    states = torch.randn(1, 4, 3, 8)
    module = TINY.build().model.layers[0].self_attn
    out, weights = attention(module, states, states, states, None, scaling=1.0, softcap=None)
    assert out.shape == (1, 3, 4, 8)
    assert weights is None


# --- what is not refused -------------------------------------------------------------------


def test_hidden_states_may_be_looked_at(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, IDS, output_hidden_states=True)
        cache.close()
    expected = ordinary(model, IDS, output_hidden_states=True)
    for one, other in zip(found.hidden_states[-1], expected.hidden_states[-1], strict=True):
        assert (one - other).abs().max() < 1e-2


@pytest.mark.parametrize("negative", [None, IDS.flip(1)], ids=["", "negative prompt"])
def test_classifier_free_guidance(negative, cold_dir):
    """The second pass of guidance has an ordinary cache of its own."""
    options = {"guidance_scale": 1.5, "negative_prompt_ids": negative, "prefill_chunk_size": None}
    model = TINY.build()
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, IDS, **options)
        cache.close()
    expected = ordinary(model, IDS, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert (logits(found) - logits(expected)).abs().max() < LOGIT_TOLERANCE[TINY.dtype]


def test_stop_strings(cold_dir):
    """`generate` hands the tokenizer that they need on to the model."""
    model, tokenizer = TINY.build(), character_tokenizer()
    told = tokenizer.decode(ordinary(model, IDS, new_tokens=8).sequences[0, IDS.shape[1] :])
    options = {"stop_strings": [told[3]], "tokenizer": tokenizer, "new_tokens": 8}
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, IDS, **options).sequences
        cache.close()
    assert torch.equal(found, ordinary(model, IDS, **options).sequences)
    assert found.shape[1] == IDS.shape[1] + told.index(told[3]) + 1 < IDS.shape[1] + 8


def test_autocast_changes_the_model_but_not_the_scoring(cold_dir):
    """Autocast would make BF16 of the float32 in which the host scores exactly."""
    model = TINY.build()
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        expected = ordinary(model, IDS, new_tokens=1)
        for alpha, device in ((1.0, "nvme"), (0.3, "nvme"), (0.3, "golden")):
            with attached(model, cold_dir, alpha=alpha, device=device) as hill:
                cache = hill.new_cache()
                outputs.append(run(model, cache, IDS, new_tokens=4))
                cache.close()
    assert (logits(outputs[0])[0] - logits(expected)[0]).abs().max() < 0.1
    assert torch.equal(bits(outputs[1]), bits(outputs[2]))


# What compiles takes seconds to import, so one process does it.
@pytest.mark.xdist_group("compiled")
def test_a_compiled_model_gives_the_same_tokens(cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill, torch.no_grad():
        plain, compiled = hill.new_cache(), hill.new_cache()
        fast = torch.compile(model, backend="eager")
        ids = IDS
        for _ in range(2):
            expected = model(ids, past_key_values=plain).logits
            assert torch.equal(fast(ids, past_key_values=compiled).logits, expected)
            ids = expected[:, -1:].argmax(-1)
        assert plain.get_seq_length() == compiled.get_seq_length() == 41
        plain.close()
        compiled.close()
