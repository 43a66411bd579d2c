# SPDX-License-Identifier: Apache-2.0
"""What a newcomer calls first works, says what it is, and names what was meant."""

import pytest
import torch
from generation_runs import attached
from test_cache_operations import feed
from tiny_models import TinyModel, prompts

import hillinfer


def test_a_cache_says_what_it_holds_and_is_closed_behind_its_block(cold_dir):
    with attached(TinyModel(layers=2).build(), cold_dir) as hill:
        with hill.new_cache() as cache:
            assert repr(cache) == "<HillInferCache of no tokens, made for LlamaForCausalLM>"
            feed(hill.model, cache, prompts([9], seed=1)[0], 256)
            assert repr(cache) == "<HillInferCache of 9 tokens, made for LlamaForCausalLM>"
            assert isinstance(cache, hillinfer.HillInferCache)
        with pytest.raises(hillinfer.CacheUseError, match="closed"), torch.no_grad():
            hill.model(torch.tensor([[1]]), past_key_values=cache)


def test_the_first_calls_need_no_numbers(cold_dir):
    model = TinyModel(layers=2).build()
    for given in ({}, {"dram_budget": "25%"}):
        with (
            hillinfer.attach(model, cold_dir=cold_dir, **given) as hill,
            hill.new_cache(),
            hill.new_cache(expected_tokens=200),
        ):
            pass


def test_a_misspelt_setting_is_told_what_was_meant():
    with pytest.raises(hillinfer.SettingsError, match="did you mean alpha") as refused:
        hillinfer.Settings().changed(alhpa=0.1)
    known = str(refused.value).partition("There are ")[2].split(", ")
    assert known == sorted(known)
    assert "block_rows" in known
    with pytest.raises(hillinfer.SettingsError, match="is no setting: choose one of alpha, beta"):
        hillinfer.Settings().changed(zzz=1)
