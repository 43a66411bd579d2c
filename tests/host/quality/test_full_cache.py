# SPDX-License-Identifier: Apache-2.0
"""Without a policy the forward pass is the ordinary one, for every family of models."""

import pytest
import torch
from generation_runs import LOGIT_TOLERANCE, RoundedCache
from tiny_models import FAMILIES, TinyModel, prompts

from hillinfer.errors import UnsupportedFeatureError
from hillinfer.settings import Settings
from hillinfer_bench.quality.forced_reading import Prefix, forced_logits, selecting
from hillinfer_bench.quality.policies import RecentOnly

MODELS = [TinyModel(family) for family in FAMILIES if family != "opt"]
MODELS += [TinyModel("opt", "mha"), TinyModel(heads="mqa"), TinyModel(dtype=torch.bfloat16)]
IDS = prompts([90])[0]
LAST = 20


@torch.no_grad()
def ordinary_logits(model):
    cache = RoundedCache(model.config)
    model(IDS[:, :-LAST], past_key_values=cache)
    return model(IDS[:, -LAST:], past_key_values=cache).logits[0].float()


def quality_logits(model, policy=None, chunk=32):
    ids = IDS[0].tolist()
    prefix = Prefix.read(model, ids[:-LAST], chunk)
    with selecting(model):
        return forced_logits(model, prefix, ids[-LAST:], policy)


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_no_policy_is_the_ordinary_cache(tiny):
    model = tiny.build()
    tolerance = LOGIT_TOLERANCE[tiny.dtype]
    assert (quality_logits(model) - ordinary_logits(model)).abs().max() < tolerance


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_selecting_everything_is_no_policy(tiny):
    model = tiny.build()
    everything = RecentOnly(Settings().changed(alpha=1.0))
    assert torch.equal(quality_logits(model, everything), quality_logits(model))


def test_selecting_little_is_noticed():
    model = TinyModel().build()
    little = RecentOnly(Settings().changed(alpha=0.1, kept_recent=4))
    assert (quality_logits(model, little) - ordinary_logits(model)).abs().max() > 0.1


def test_rounding_of_a_prefix_is_that_of_rows():
    model = TinyModel().build()
    prefix = Prefix.read(model, IDS[0].tolist())
    assert prefix.tokens == 90
    assert {states.dtype for states in (*prefix.keys, *prefix.values)} == {torch.float16}


def test_a_prefix_can_be_continued_again_and_again():
    model = TinyModel().build()
    ids = IDS[0].tolist()
    prefix = Prefix.read(model, ids[:-LAST])
    before = [states.clone() for states in (*prefix.keys, *prefix.values)]
    with selecting(model):
        first = forced_logits(model, prefix, ids[-LAST:], None)
        forced_logits(model, prefix, ids[:LAST], None)
        assert torch.equal(forced_logits(model, prefix, ids[-LAST:], None), first)
    assert all(
        torch.equal(one, other)
        for one, other in zip(before, (*prefix.keys, *prefix.values), strict=True)
    )


def test_the_model_is_left_as_it_was():
    model = TinyModel().build()
    expected = ordinary_logits(model)
    with pytest.raises(ZeroDivisionError), selecting(model):
        _ = 1 / 0
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(ordinary_logits(model), expected)


def test_models_with_windows_are_refused():
    tiny = TinyModel("mistral").build()
    tiny.config.sliding_window = 16
    with pytest.raises(UnsupportedFeatureError, match="sliding"), selecting(tiny):
        pass
