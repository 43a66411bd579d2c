# SPDX-License-Identifier: Apache-2.0
"""The row of one token, stored in one native call, is the one that torch rounds and packs."""

import math

import numpy as np
import pytest
import torch

from hillinfer.engine.budget_plan import staging_bytes
from hillinfer.engine.runtime import Runtime
from hillinfer.model_shape import ModelShape, StoredType
from hillinfer.settings import Settings

SETTINGS = Settings().changed(block_rows=64, io_threads=2)
TYPES = [
    (torch.float32, StoredType.FLOAT16),
    (torch.float16, StoredType.FLOAT16),
    (torch.bfloat16, StoredType.BFLOAT16),
]
# What rounds in a way of its own: ties, what is subnormal in FP16, and what does not fit it.
EDGES = [
    *(0.0, -0.0, 1.0, 1.00048828125, 1.00146484375, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-26),
    *(2.0**-26, -(2.0**-15) * 1.0009765625, 65504.0, 65519.99, 65520.0, -65520.0, 1e9, 2.0**-149),
    *(math.inf, -math.inf, math.nan),
]


def shape_of(stored):
    return ModelShape(2, 3, 3, 10, stored, 4096)


@pytest.fixture
def make_runtime(cold_dir):
    made = []

    def make(stored):
        shape = shape_of(stored)
        made.append(Runtime(shape, SETTINGS, staging_bytes(shape, SETTINGS) + (1 << 20), cold_dir))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


def tokens_of(dtype, count):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(count, 2, 3, 1, 10, generator=generator)
    states *= 2.0 ** torch.randint(-26, 18, states.shape, generator=generator)
    states.view(-1)[: len(EDGES)] = torch.tensor(EDGES)
    return states.to(dtype)


@pytest.mark.parametrize(("dtype", "stored"), TYPES)
def test_a_row_has_the_bits_that_torch_rounds_to(make_runtime, dtype, stored):
    runtime = make_runtime(stored)
    ones, others = runtime.open_sequence(), runtime.open_sequence()
    # Views as models give them: rows and heads apart, numbers of a head together.
    for keys, values in tokens_of(dtype, 40):
        rounded = [runtime.layout.round(states) for states in (keys, values)]
        overflows = sum(count for _, count in rounded)
        before = runtime.counters.fp16_overflows
        two = torch.zeros(2, 3, 4, 10, dtype=dtype)
        two[1, :, 2] = keys[:, 0]
        assert runtime.append_token(1, ones, two[:, :, 2:3], values[None].expand(2, 3, 1, 10), 1)
        assert runtime.counters.fp16_overflows - before == overflows
        runtime.append(1, others, rounded[0][0], rounded[1][0])
    assert list(ones.lengths) == list(others.lengths) == [0, 40]
    np.testing.assert_array_equal(ones.tails, others.tails)
    # The twin: one number that differs in its last bit.
    others.tails[1, 39, 0] ^= 1
    assert (ones.tails != others.tails).any()
    keys, _ = tokens_of(dtype, 40)[39]
    newest = runtime.parts.rows.newest_keys(1, ones)
    assert torch.equal(newest, runtime.layout.round(keys)[0])


def test_a_token_that_fills_its_group_is_left_to_others(make_runtime):
    runtime = make_runtime(StoredType.FLOAT16)
    sequence = runtime.open_sequence()
    state = torch.ones(1, 3, 1, 10)
    assert all(runtime.append_token(0, sequence, state, state, 0) for _ in range(63))
    assert not runtime.append_token(0, sequence, state, state, 0)
    assert sequence.lengths[0] == 63


@pytest.mark.parametrize(
    "states",
    [torch.ones(3, 1, 10, dtype=torch.bfloat16), torch.ones(3, 10, 2).transpose(1, 2)[:, :1]],
    ids=["of another type", "apart from each other"],
)
def test_numbers_that_the_library_does_not_find_are_left_to_others(make_runtime, states):
    runtime = make_runtime(StoredType.FLOAT16)
    sequence = runtime.open_sequence()
    assert not runtime.append_token(0, sequence, states[None], states[None], 0)
    assert sequence.lengths[0] == 0
