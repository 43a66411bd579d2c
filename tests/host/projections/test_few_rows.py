# SPDX-License-Identifier: Apache-2.0
"""Products of few rows: torch's up to rounding, and the same bits whoever is beside a row."""

import pytest
import torch
from tiny_models import TinyModel, prompts
from transformers import GPT2Config, GPT2LMHeadModel

from hillinfer.native.library import Variant, native_library
from hillinfer.projections.attachment import ProjectionAttachment
from hillinfer.projections.step_products import StepProducts
from hillinfer.projections.ways import MOST_ROWS, FewRowsLayers, make_projections
from hillinfer.reuse.described_model import DescribedModel

VARIANTS = [pytest.param(one.number, id=one.value) for one in native_library().variants]
FASTEST = native_library().variants[0].number
IDS = prompts([5, 5, 5])[0]
# Of one rounding to the type, as a share of the outputs' deviation.
TYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 0.02, id="bfloat16"),
]


def numbers(*shape, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(dtype)


def built(dtype=torch.float32):
    return TinyModel("llama", "gqa", dtype, head_dim=16).build()


def few_rows(states, weight, bias, variant):
    layers = FewRowsLayers([(weight, bias)], variant)
    assert layers.takes(states)
    return layers.outputs(states)[0]


def largest_error(found, states, weight, bias):
    wanted = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    return float((found - wanted).abs().max() / wanted.std())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "most"), TYPES)
@pytest.mark.parametrize("inputs", [1, 61, 64, 576])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_outputs_are_those_of_the_product(variant, dtype, most, inputs, has_bias):
    weight = numbers(37, inputs, dtype=dtype)
    bias = numbers(37, dtype=dtype) if has_bias else None
    for rows in range(1, MOST_ROWS + 1):
        states = numbers(rows, 1, inputs, dtype=dtype)
        found = few_rows(states, weight, bias, variant)
        assert found.shape == (rows, 1, 37)
        assert found.dtype is dtype
        assert largest_error(found[:, 0], states[:, 0], weight, bias) < most
        # The twin: a weight of the last output counts.
        changed = weight.clone()
        changed[-1, -1] += 1
        assert not torch.equal(few_rows(states, changed, bias, variant), found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_of_rounded_numbers_are_rounded_once(variant):
    """To the nearest, ties to even; they are those of the same numbers in float32."""
    weight, states = (numbers(*shape, dtype=torch.bfloat16) for shape in ((300, 1001), (5, 1001)))
    bias = numbers(300, dtype=torch.bfloat16)
    # These outputs lie in the middle between two numbers, at the largest one, and nowhere.
    weight[:4], states[0] = 0, 1
    weight[:4, 0] = torch.tensor([1, 1, 3e38, torch.nan])
    weight[:3, 1] = torch.tensor([2**-8, 3 * 2**-8, 3e38])
    wide = [one.float() for one in (states, weight, bias)]
    for given, own in ((None, None), (bias, wide[2])):
        found = few_rows(states, weight, given, variant)
        wanted = few_rows(*wide[:2], own, variant).bfloat16()
        assert torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)
        assert found[0, 3].isnan()
        # The twin: they are not cut off.
        cut = few_rows(*wide[:2], own, variant).view(torch.int32) >> 16
        assert not torch.equal(found.view(torch.int16).int(), cut)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_its_bits_whoever_is_beside_it(variant, dtype):
    weight, states = numbers(300, 1000, dtype=dtype), numbers(MOST_ROWS, 1000, dtype=dtype)
    together = few_rows(states, weight, None, variant)
    for count in (1, 2, 7, 9):
        assert torch.equal(few_rows(states[:count], weight, None, variant), together[:count])
    assert torch.equal(few_rows(states[3:4], weight, None, variant)[0], together[3])
    # The twin: another row has others.
    assert not torch.equal(together[2], together[3])


def test_threads_change_no_bit():
    """Of a matrix that several of them share."""
    weight, states = numbers(700, 1001), numbers(5, 1001)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(few_rows(states, weight, None, FASTEST))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_may_lie_apart():
    weight, wide = numbers(9, 20), numbers(4, 50)
    assert torch.equal(
        few_rows(wide[:, 10:30], weight, None, FASTEST),
        few_rows(wide[:, 10:30].contiguous(), weight, None, FASTEST),
    )
    across = numbers(20, 4).T
    assert torch.equal(
        few_rows(across, weight, None, FASTEST),
        few_rows(across.contiguous(), weight, None, FASTEST),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_stays_in_its_row_and_output(variant):
    weight, states = numbers(6, 40), numbers(3, 40)
    states[1, 7], weight[4, 39] = torch.nan, torch.inf
    found = few_rows(states, weight, None, variant).isfinite()
    assert not found[1].any()
    assert not found[:, 4].any()
    assert found[[0, 2]][:, [0, 1, 2, 3, 5]].all()


def test_variants_are_close():
    weight, states = numbers(50, 576), numbers(8, 576)
    plain = few_rows(states, weight, None, Variant.PORTABLE.number)
    assert torch.allclose(few_rows(states, weight, None, FASTEST), plain, atol=1e-4)


# --- a model's layers ---


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def test_sequences_of_a_batch_have_the_bits_that_each_has_alone():
    model = built()
    with ProjectionAttachment(model, make_projections("rows")):
        together = logits(model, IDS[:, :5])
        alone = torch.cat([logits(model, one[None, :5]) for one in IDS])
    # 15 rows, and 5.
    assert torch.equal(together, alone)
    # The twin: they are not the bits of torch's products.
    assert not torch.equal(together, logits(model, IDS[:, :5]))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["float32", "bfloat16"]
)
def test_layers_change_in_steps_alone(dtype, most):
    model = built(dtype)
    layer, states = model.model.layers[0].mlp.down_proj, numbers(3, 1, 128, dtype=dtype)
    stock = logits(model, IDS)
    steps, described = StepProducts(model), DescribedModel(model)
    facts = described.facts()
    assert steps.layers == sum(isinstance(one, torch.nn.Linear) for one in model.modules())
    assert torch.equal(logits(model, IDS), stock)
    own = few_rows(states, layer.weight.detach(), None, FASTEST)
    many = states.expand(-1, MOST_ROWS, -1)
    with torch.no_grad(), steps:
        assert torch.equal(layer(states), own)
        assert torch.allclose(logits(model, IDS), stock, atol=most)
        assert torch.equal(layer(many), torch.nn.functional.linear(many, layer.weight))
        few = numbers(1, 3, 128, dtype=dtype)
        assert torch.equal(layer(few), torch.nn.functional.linear(few, layer.weight))
        assert described.facts() != facts
    # A store finds the same model's rows.
    assert described.facts() == facts
    assert torch.equal(logits(model, IDS), stock)
    assert not any("forward" in vars(one) for one in model.modules())


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2"])
def test_layers_of_one_input_have_their_own_outputs_in_any_order(family):
    model = TinyModel(family, "gqa" if family != "opt" else "mha", torch.float32).build()
    attention = [one for name, one in model.named_modules() if name.endswith("self_attn")][1]
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    states, others = (numbers(2, 1, layers[0].in_features) for _ in range(2))
    others = others + 1
    with torch.no_grad(), StepProducts(model):
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 1, 2, 2)):
            # A foreign input between them takes nobody's part.
            asked = [(place, one) for place in order for one in (states, others)]
            asked += [(place, states) for place in order]
            for place, given in asked:
                layer = layers[place]
                bias = None if layer.bias is None else layer.bias.detach()
                own = few_rows(given, layer.weight.detach(), bias, FASTEST)
                assert torch.equal(layer(given), own)


@pytest.mark.parametrize("way", ["parameter", "data", "bias", "other type"])
def test_a_layer_that_gets_other_weights_has_their_outputs(way):
    model = built()
    layer, states = model.model.layers[0].mlp.down_proj, numbers(1, 1, 128)
    other = numbers(*layer.weight.shape) + 1
    with torch.no_grad(), StepProducts(model):
        before = layer(states)
        if way == "parameter":
            layer.weight = torch.nn.Parameter(other)
        elif way == "data":
            layer.weight.data = other
        elif way == "bias":
            layer.bias = torch.nn.Parameter(numbers(len(other)) + 1)
        else:
            layer.weight.data, states = other.double(), states.double()
        wanted = torch.nn.functional.linear(states, layer.weight, layer.bias)
        assert torch.allclose(layer(states), wanted, atol=1e-4)
        assert not torch.allclose(before.double(), wanted.double(), atol=1e-2)


def test_a_layer_of_another_type_than_its_partner_is_computed_by_itself():
    model = built()
    mlp, states = model.model.layers[0].mlp, numbers(1, 1, 64)
    with torch.no_grad(), StepProducts(model):
        for layer in (mlp.gate_proj, mlp.up_proj):
            assert layer(states).shape[-1] == layer.out_features
        mlp.up_proj.bfloat16()
        own = torch.nn.functional.linear(states, mlp.gate_proj.weight)
        assert torch.allclose(mlp.gate_proj(states), own, atol=1e-5)
        with pytest.raises(RuntimeError, match="dtype"):
            mlp.up_proj(states)


def test_what_others_have_covered_stays_theirs():
    model = built()
    layer, states = model.model.layers[0].mlp.down_proj, numbers(1, 1, 128)
    steps = StepProducts(model)
    with ProjectionAttachment(model, make_projections("prepacked")), torch.no_grad():
        packed = layer(states)
        with steps:
            assert torch.equal(layer(states), packed)
        assert torch.equal(layer(states), packed)
    with torch.no_grad():
        stock = layer(states)
        with steps:
            with steps:
                inner = layer(states)
            # Entered within itself it ends with the outer one.
            assert torch.equal(layer(states), inner)
        assert torch.equal(layer(states), stock)
    assert torch.equal(inner, few_rows(states, layer.weight.detach(), None, FASTEST))
    # Gradients go through the model's own products.
    with steps:
        assert layer(states.requires_grad_()).requires_grad


def test_an_error_ends_a_step():
    model = built()
    stock, steps = logits(model, IDS[:1, :4]), StepProducts(model)
    with pytest.raises(ZeroDivisionError), steps:
        raise ZeroDivisionError
    assert torch.equal(logits(model, IDS[:1, :4]), stock)


def test_models_that_are_not_plain_stay_as_they_are():
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=61)).eval()
    packed = built()
    with ProjectionAttachment(packed, make_projections("fused")):
        assert StepProducts(packed).layers == 0
    for model in (other, built(torch.float16)):
        assert StepProducts(model).layers == 0
        assert not any("forward" in vars(one) for one in model.modules())
