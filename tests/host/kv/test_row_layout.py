# SPDX-License-Identifier: Apache-2.0
"""One token's keys and values as one row, bit by bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer.kv.sequence import RowLayout
from hillinfer.model_shape import ModelShape, StoredType

TYPES = {StoredType.FLOAT16: torch.float16, StoredType.BFLOAT16: torch.bfloat16}


def layout_of(kv_heads=2, head_dim=8, stored=StoredType.FLOAT16):
    shape = ModelShape(
        layers=1,
        kv_heads=kv_heads,
        query_heads=kv_heads,
        head_dim=head_dim,
        stored_type=stored,
        max_positions=100,
    )
    return RowLayout(shape)


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    tokens=st.integers(1, 9),
    stored=st.sampled_from(StoredType),
    seed=st.integers(0, 1000),
)
def test_every_bit_pattern_survives(kv_heads, head_dim, tokens, stored, seed):
    layout = layout_of(kv_heads, head_dim, stored)
    # All patterns, NaNs with payloads and negative zeros among them.
    codes = np.random.default_rng(seed).integers(
        0, 1 << 16, (2, kv_heads, tokens, head_dim), np.uint16
    )
    keys, values = (torch.from_numpy(part.view(np.int16)).view(TYPES[stored]) for part in codes)
    rows = np.full((tokens, layout.row_bytes), 255, np.uint8)
    layout.pack(keys, values, rows)

    assert layout.row_bytes % 64 == 0
    items = kv_heads * head_dim
    assert layout.row_bytes - 4 * items < 64
    as_codes = rows.view(np.uint16)
    np.testing.assert_array_equal(
        as_codes[:, :items].reshape(tokens, kv_heads, head_dim), codes[0].transpose(1, 0, 2)
    )
    np.testing.assert_array_equal(
        as_codes[:, items : 2 * items].reshape(tokens, kv_heads, head_dim),
        codes[1].transpose(1, 0, 2),
    )
    assert (as_codes[:, 2 * items :] == 0).all(), "padding is zeros"

    for part in (slice(None), slice(tokens // 2, None)):
        views = torch.from_numpy(rows)[part]
        for view, expected in ((layout.keys(views), codes[0]), (layout.values(views), codes[1])):
            assert view.data_ptr() >= views.data_ptr(), "a view, not a copy"
            np.testing.assert_array_equal(
                view.view(torch.int16).numpy().view(np.uint16), expected.transpose(1, 0, 2)[part]
            )


def test_rows_inside_a_larger_buffer():
    layout = layout_of()
    buffer = np.full((8, layout.row_bytes), 255, np.uint8)
    states = torch.randn(2, 3, 8).half()
    layout.pack(states, -states, buffer[2:5])
    assert (buffer[[0, 1, 5, 6, 7]] == 255).all()
    assert torch.equal(layout.keys(torch.from_numpy(buffer)[2:5]).transpose(0, 1), states)


@pytest.mark.parametrize("stored", StoredType)
def test_the_models_own_16_bits_are_stored_as_they_are(stored):
    layout = layout_of(stored=stored)
    states = torch.randn(2, 3, 8).to(TYPES[stored])
    rounded, overflows = layout.round(states)
    assert rounded is states
    assert overflows == 0


def test_fp32_is_rounded_to_the_nearest_fp16_and_overflow_saturates_and_counts():
    values = torch.tensor(
        [0.0, -0.0, 1 + 2**-11, 65504.0, 65519.99, 65520.0, -65520.0, 1e38, -1e38, 2**-25]
    )
    rounded, overflows = layout_of().round(values)
    assert rounded.dtype == torch.float16
    assert rounded.tolist() == [0, 0, 1, 65504, 65504, 65504, -65504, 65504, -65504, 0]
    assert overflows == 4


@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_to_one_side_alone_saturates_and_counts(sign):
    rounded, overflows = layout_of().round(sign * torch.tensor([1.0, 65520.0, 1e38]))
    assert rounded.tolist() == [sign, sign * 65504, sign * 65504]
    assert overflows == 2


def test_infinities_and_nans_are_no_overflow():
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e6])
    rounded, overflows = layout_of().round(values)
    assert rounded[0] == torch.inf
    assert rounded[1] == -torch.inf
    assert rounded[2].isnan()
    assert rounded[3] == 65504
    assert overflows == 1


def test_padding_alone_rounds_to_nothing():
    rounded, overflows = layout_of().round(torch.zeros(2, 0, 8))
    assert rounded.shape == (2, 0, 8)
    assert overflows == 0
