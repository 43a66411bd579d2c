# SPDX-License-Identifier: Apache-2.0
"""Models that would give wrong answers are refused when attaching, and stay as they were."""

import pytest
import torch
from generation_runs import attached, logits, ordinary, run
from refused_models import (
    REFUSED,
    REFUSED_BY_FIRST_PASS,
    mixtral,
    qwen3_moe,
    soft_capped_gemma2_without_sliding_layers,
)
from tiny_models import FAMILIES, TinyModel, prompts
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.hf.features import TESTED_FAMILIES


@pytest.mark.parametrize(
    ("make", "message"), REFUSED.items(), ids=[make.__name__ for make in REFUSED]
)
def test_the_model_is_refused_by_name_and_left_alone(make, message, cold_dir):
    model = make().eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedFeatureError, match=message):
        attached(model, cold_dir)
    assert model.config._attn_implementation == before
    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_model_with_another_causal_mask_is_refused_before_its_first_token(cold_dir):
    """All layers look ordinary, but the mask function of a window gives the model away."""
    model = soft_capped_gemma2_without_sliding_layers().eval()
    ids, _ = prompts([40])
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(UnsupportedFeatureError, match=r"causal mask \(windows.*ordinary cache"):
            run(model, cache, ids)
        assert cache.statistics().kv_bytes == 0
        cache.close()


@pytest.mark.parametrize(
    ("make", "message"),
    REFUSED_BY_FIRST_PASS.items(),
    ids=[make.__name__ for make in REFUSED_BY_FIRST_PASS],
)
def test_a_model_whose_attention_is_its_own_is_refused_by_its_first_pass(make, message, cold_dir):
    """It attends twice to what it stores, with other values, or adds something to its scores."""
    model = make().eval()
    ids, _ = prompts([40])
    with attached(model, cold_dir) as hill:
        cache = hill.new_cache()
        with pytest.raises(UnsupportedFeatureError, match=message):
            run(model, cache, ids)
        assert cache.get_seq_length() == 0
        cache.close()


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_a_model_of_experts_computes_what_it_does_with_its_ordinary_cache(make, cold_dir):
    """Its layers hand on whether the router's logits are wanted, which attention need not know."""
    model = make().eval()
    ids, _ = prompts([40])
    expected = ordinary(model, ids)
    with attached(model, cold_dir, alpha=1.0, exact=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids)
        cache.close()
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=1e-4)
    # The twin: of another token's logits it would be told.
    with pytest.raises(AssertionError):
        torch.testing.assert_close(logits(found)[1:], logits(expected)[:-1], rtol=0, atol=1e-4)


def test_another_transformers_is_refused(monkeypatch, tmp_path, cold_dir):
    # What Python says is installed where it looks first.
    facts = tmp_path / "transformers-5.24.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.24.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedFeatureError, match=r"5\.24\.1 is outside.*pip install"):
        attached(TinyModel().build(), cold_dir)


def test_every_supported_family_is_accepted(cold_dir):
    assert FAMILIES == TESTED_FAMILIES
    for family in FAMILIES:
        model = TinyModel(family, "mha").build()
        assert model.config.model_type == family
        attached(model, cold_dir).detach()


def test_a_family_beside_the_required_ones(cold_dir):
    """GPT-NeoX goes the same way through transformers; untested families are not forbidden."""
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=512,
        eos_token_id=None,
        initializer_range=0.3,
    )
    model = GPTNeoXForCausalLM(config).eval()
    ids, _ = prompts([150])
    with attached(model, cold_dir, alpha=1.0) as hill:
        cache = hill.new_cache()
        found = run(model, cache, ids, new_tokens=4)
        cache.close()
    assert torch.equal(found.sequences, ordinary(model, ids, new_tokens=4).sequences)
