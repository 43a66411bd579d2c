# SPDX-License-Identifier: Apache-2.0
"""Views of the keys in open groups: the memory itself, as long as there is a sequence."""

import gc
import weakref

import pytest
import torch

from hillinfer.kv.sequence import RowLayout, RowPart, Sequence
from hillinfer.model_shape import ModelShape, StoredType


def made(stored_type):
    shape = ModelShape(2, 2, 4, 6, stored_type, 1000)
    layout = RowLayout(shape)
    return RowPart(layout.keys), layout, Sequence(shape.layers, shape.row_bytes)


def states(seed, layout, tokens=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, tokens, 6, generator=generator).to(layout.stored_type)


@pytest.mark.parametrize("stored_type", StoredType)
def test_keys_are_those_that_lie_there_now(stored_type):
    tails, layout, sequence = made(stored_type)
    for seed in range(3):
        for layer in range(2):
            keys, values = states(10 * seed + layer, layout)
            layout.pack(keys, values, sequence.tails[layer][20:25])
            found = tails.in_tail(layer, sequence, 21, 25)
            assert found.dtype == torch.float16
            assert torch.equal(found, keys[:, 1:].transpose(0, 1).half())
            assert not torch.equal(found, values[:, 1:].transpose(0, 1).half())
    assert not torch.equal(tails.in_tail(0, sequence, 20, 25), tails.in_tail(1, sequence, 20, 25))


def test_each_sequence_has_its_own_and_is_forgotten():
    tails, layout, one = made(StoredType.FLOAT16)
    other = Sequence(2, one.tails.shape[2])
    layout.pack(*states(1, layout), one.tails[0][:5])
    assert not torch.equal(tails.in_tail(0, one, 0, 5), tails.in_tail(0, other, 0, 5))
    memory, others = weakref.ref(one.tails), weakref.ref(other.tails)
    del one
    gc.collect()
    assert memory() is None, "its views are still known"
    assert others() is not None
