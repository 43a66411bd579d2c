# SPDX-License-Identifier: Apache-2.0
"""A copy of an attached model is a model of its own, and is not attached."""

import copy
import io
import pickle

import pytest
import torch
from generation_runs import attached, bits, run
from tiny_models import TinyModel, prompts
from transformers import AutoModelForCausalLM, DynamicCache

from hillinfer.errors import CacheUseError

# A third layer is the first whose query is predicted, by hooks.
TINY = TinyModel(layers=3)
IDS, _ = prompts([40])


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


def generated(model):
    """Generate with the ordinary cache."""
    return run(model, DynamicCache(config=model.config), IDS)


@pytest.mark.parametrize(
    ("way", "implementation"),
    [(copy.deepcopy, "sdpa"), (copy.deepcopy, "eager"), (WAYS["pickle"], "eager"), (saved, "sdpa")],
)
def test_a_copy_computes_with_its_own_weights(way, implementation, cold_dir):
    model = TINY.build()
    model.set_attn_implementation(implementation)
    before = generated(model)
    hill = attached(model, cold_dir)
    twin = way(model)
    assert twin.config._attn_implementation == implementation
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(bits(generated(twin)), bits(before))
    assert not generated(model).logits[0].any()
    hill.detach()
    assert torch.equal(bits(generated(twin)), bits(before))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_copy_can_be_attached_by_itself(way, cold_dir):
    model = TINY.build()
    with attached(model, cold_dir) as hill:
        twin = way(model)
        cache = hill.new_cache()
        expected = run(model, cache, IDS)
        with torch.no_grad(), pytest.raises(CacheUseError, match=r"never put on.*attach\(model\)"):
            twin(IDS[:, :1], past_key_values=cache.fork())
        cache.close()
    with torch.no_grad():
        # What the first model's hooks would predict a query with.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    with attached(twin, cold_dir) as hill:
        cache = hill.new_cache()
        found = run(twin, cache, IDS)
        twice = run(copy.deepcopy(twin), DynamicCache(config=twin.config), IDS)
        cache.close()
    assert torch.equal(bits(found), bits(expected))
    assert torch.equal(generated(twin).sequences, twice.sequences)


def test_a_copy_keeps_a_generate_of_the_users_own(cold_dir):
    model = TINY.build()
    model.generate = len
    with attached(model, cold_dir):
        for way in WAYS.values():
            assert way(model).generate is len


def test_an_attached_model_can_be_saved_and_moved(cold_dir, tmp_path):
    model = TINY.build()
    before = generated(model)
    with attached(model, cold_dir):
        model.save_pretrained(tmp_path / "model")
        torch.save(model.state_dict(), tmp_path / "weights")
        model.to(torch.float64)
        model.to(torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    assert torch.equal(bits(generated(read)), bits(before))
    blank = TinyModel(layers=3, seed=7).build()
    blank.load_state_dict(torch.load(tmp_path / "weights"))
    assert torch.equal(bits(generated(blank)), bits(before))
