"""Ordinary caches are attended to without copies of shared heads, with transformers' bits."""

import pytest
import torch
from tiny_models import TinyModel, every_model, prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import hillinfer
from hillinfer.attention.grouped_query import NAME

# Tokens of the passes behind the first one of 150: one, a few, and more than a block of queries.
_PARTS = [1, 7, 56]


@torch.no_grad()
def passes(model, ids):
    """Logits of a prompt of 214 tokens that is read in parts."""
    cache = DynamicCache(config=model.config)
    return torch.cat(
        [model(part, past_key_values=cache).logits for part in ids.split([150, *_PARTS], 1)], 1
    )


@pytest.mark.parametrize("tiny", every_model(), ids=str)
def test_bits_are_those_of_transformers(tiny):
    model = tiny.build()
    ids, _ = prompts([214])
    expected = passes(model, ids)
    with hillinfer.grouped_query(model):
        found = passes(model, ids)
    assert torch.equal(found, expected)


def test_another_key_is_seen():
    """The twin: bits differ once one token in the middle does."""
    model = TinyModel().build()
    ids, _ = prompts([214])
    expected = passes(model, ids)
    ids[0, 75] = (ids[0, 75] + 1) % model.config.vocab_size
    with hillinfer.grouped_query(model):
        assert not torch.equal(passes(model, ids)[:, -1], expected[:, -1])


class Watched(TorchDispatchMode):
    """Notes how many keys lie in memory for each that torch's kernel is given."""

    def __init__(self):
        super().__init__()
        self.lying = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.name():
            key = args[1]
            self.lying.append(key.untyped_storage().nbytes() / key.numel() / key.element_size())
        return func(*args, **(kwargs or {}))


def test_no_key_is_copied_for_a_head_that_shares_it():
    tiny = TinyModel()
    model = tiny.build()
    ids, _ = prompts([214])
    with hillinfer.grouped_query(model), Watched() as grouped:
        passes(model, ids)
    with Watched() as copied:
        passes(model, ids)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    assert {*grouped.lying} == {1 / group}
    assert 1.0 in copied.lying


def test_several_sequences_are_attended_to_as_before():
    model = TinyModel().build()
    ids, mask = prompts([150, 90])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with hillinfer.grouped_query(model):
            found = model(ids, attention_mask=mask).logits
    assert torch.equal(found, expected)


def test_padding_of_one_sequence_is_not_attended_to():
    model = TinyModel().build()
    ids, _ = prompts([150])
    mask = torch.ones_like(ids)
    mask[:, :20] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with hillinfer.grouped_query(model):
            found = model(ids, attention_mask=mask).logits
            whole = model(ids).logits
    assert torch.equal(found[:, 20:], expected[:, 20:])
    assert not torch.equal(found[:, 20:], whole[:, 20:])


def test_gradients_are_those_of_before():
    model = TinyModel().build()
    ids, _ = prompts([40])

    def gradient():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient()
    with hillinfer.grouped_query(model):
        assert torch.equal(gradient(), expected)


def test_an_attached_model_does_so_by_itself(cold_dir):
    model = TinyModel().build()
    ids, _ = prompts([214])
    expected = passes(model, ids)
    with hillinfer.attach(model, cold_dir=cold_dir):
        assert torch.equal(passes(model, ids), expected)


def test_the_model_is_as_it_was_behind_the_block():
    model = TinyModel().build()
    with pytest.raises(ZeroDivisionError), hillinfer.grouped_query(model):
        _ = 1 // (model.config._attn_implementation != NAME)
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_is_refused_with_a_way_out(cold_dir):
    model = TinyModel().build()
    model.set_attn_implementation("eager")
    with (
        pytest.raises(hillinfer.UnsupportedFeatureError, match=r"'eager'.*set_attn_implementation"),
        hillinfer.grouped_query(model),
    ):
        pass
    model.set_attn_implementation("sdpa")
    with (
        hillinfer.attach(model, cold_dir=cold_dir),
        pytest.raises(hillinfer.UnsupportedFeatureError, match="attached model does the same"),
        hillinfer.grouped_query(model),
    ):
        pass
