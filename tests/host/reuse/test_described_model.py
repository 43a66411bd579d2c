# SPDX-License-Identifier: Apache-2.0
"""What names a model's rows in a store follows its weights, whatever takes their place."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel

from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.store.store import Store

# What takes freed memory gets the old place, and the old number, in most of so many turns.
TURNS = 12


@pytest.fixture
def name(tmp_path):
    """Return what a model's rows are stored under, as it is just now."""
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:

        def of(model):
            prompts = ModelPrompts(store, model)
            return lambda: prompts.divided(64).namespace

        yield of


def weight_anew(mlp, values):
    mlp.down_proj.register_parameter("weight", None)
    mlp.down_proj.register_parameter("weight", torch.nn.Parameter(values(), requires_grad=False))


def module_anew(mlp, values):
    # As an adapter goes and another comes.
    mlp.register_module("down_proj", None)
    made = torch.nn.Linear(64, 32, bias=False).eval().requires_grad_(False)
    made.weight.copy_(values())
    mlp.register_module("down_proj", made)


def counter_anew(mlp, values):
    # Written where it lies, and then another one that nobody wrote to.
    weight = mlp.down_proj.weight.copy_(values()).data
    mlp.down_proj.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))


@pytest.mark.parametrize("change", [weight_anew, module_anew, counter_anew])
def test_weights_in_the_place_of_others_have_another_name(name, change, tmp_path):
    model = TinyModel(head_dim=8).build()
    mlp = model.model.layers[0].mlp
    shape = mlp.down_proj.weight.shape
    for turn in range(TURNS):
        save_file({"w": torch.full(shape, float(turn))}, tmp_path / f"{turn}.safetensors")
    now, names = name(model), []
    # Whose counter has not begun.
    weight_anew(mlp, lambda: torch.full(shape, -1.0))
    now()
    for turn in range(TURNS):
        change(mlp, lambda turn=turn: load_file(tmp_path / f"{turn}.safetensors")["w"])
        names.append(now())
    assert len(set(names)) == TURNS
    # The twin: the first weights again have the first name.
    change(mlp, lambda: load_file(tmp_path / "0.safetensors")["w"])
    assert now() == names[0]


def test_weights_that_were_of_another_type_have_another_name(name):
    model = TinyModel(head_dim=8).build()
    layer = model.model.layers[0].mlp.down_proj.requires_grad_(False)
    now = name(model)
    for _ in range(TURNS):
        layer.weight.uniform_()
        before = now()
        # The same tensor, in memory that begins where the other did.
        layer.half()
        layer.float()
        rounded = now()
        assert rounded != before
        # The twin: what is rounded already.
        layer.half()
        layer.float()
        assert now() == rounded


def test_weights_without_counters_are_looked_at_each_time(name):
    with torch.inference_mode():
        model = TinyModel(head_dim=8).build()
        weight = model.model.layers[0].self_attn.v_proj.weight
        assert weight.is_inference()
        now = name(model)
        before = now()
        assert now() == before
        weight.mul_(2)
        after = now()
        assert after != before
        # The twin: the same weights again.
        weight.div_(2)
        assert now() == before
