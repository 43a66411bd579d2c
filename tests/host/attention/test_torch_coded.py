# SPDX-License-Identifier: Apache-2.0
"""Attention over rows and coded tokens in torch against the golden model, to the bit."""

import numpy as np
import pytest
import torch
from coded_cases import (
    Layer,
    coded_segment,
    every_shape,
    golden_coded_block,
    golden_products,
    same_bits,
)
from native_cases import shape_of
from twins.torch_values import encode_values, value_statistics

from hillinfer.attention.torch_coded import (
    TorchCodedAttention,
    TorchCodedTokens,
    fused_multiply_add,
)
from hillinfer.model_shape import StoredType
from hillinfer_model import floats, value_codes
from hillinfer_model.channel_statistics import ChannelStatistics
from hillinfer_model.coded_attention import attend, exact_block
from hillinfer_model.key_codes import INVALID_EXPONENT

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
every_device = pytest.mark.parametrize("device", DEVICES)


def on(device, segment):
    """A segment of the cases as torch takes it."""
    golden = segment.golden()
    given = (
        golden.aligned,
        golden.invalid_keys,
        golden.values.codes,
        golden.values.exponents,
        golden.statistics.exponents,
        golden.statistics.means,
    )
    return TorchCodedTokens(*(torch.from_numpy(one).to(device) for one in given))


def attended(device, layer):
    rows = layer.golden_rows()
    given = (torch.from_numpy(one).to(device) for one in (layer.scaled, rows.keys, rows.values))
    attention = TorchCodedAttention(torch.device(device))
    return attention.attend(*given, [on(device, one) for one in layer.segments]).cpu().numpy()


def golden_of(layer):
    with np.errstate(over="ignore", invalid="ignore"):
        golden = [one.golden() for one in layer.segments]
        return attend(layer.scaled, layer.golden_rows(), golden)


def same_block(found, block, head, expected):
    return (
        np.array_equal(found.powers[block, head].cpu(), expected.powers)
        and np.array_equal(found.totals[block, head].cpu(), expected.totals)
        and np.array_equal(found.broken[block, head].cpu(), expected.broken)
        and same_bits(found.outputs[block, head].cpu().numpy(), expected.outputs)
    )


# --- One operation ---


@every_device
def test_fused_multiply_add_rounds_once(device):
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, (3, 200_000), dtype=np.uint64).astype(np.uint32)
    # Sums that nearly cancel, and ties of float32 that a rest of the product decides.
    left, right, addend = bits.view(np.float32)
    with np.errstate(all="ignore"):
        addend[:50_000] = -(left * right)[:50_000]
        left[50_000:100_000] = 1 + generator.integers(0, 2**12, 50_000) * np.float32(2**-12)
        right[50_000:100_000] = 1 + generator.integers(0, 2**12, 50_000) * np.float32(2**-12)
        addend[50_000:100_000] = np.exp2(generator.integers(-60, 30, 50_000)).astype(np.float32)
        expected = floats.fused_multiply_add(left, right, addend)
        twice = (left.astype(np.float64) * right + addend).astype(np.float32)
    given = (torch.from_numpy(one.copy()).to(device) for one in (left, right, addend))
    found = fused_multiply_add(*given).cpu().numpy()
    assert same_bits(found, expected)
    # What rounds to float64 first is another operation.
    assert not same_bits(twice, expected)


# --- Blocks ---


@every_device
@every_shape
@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_exact_blocks(device, shape, count):
    layer = Layer(shape, count, ())
    rows = layer.golden_rows()
    products = np.stack([golden_products(layer, head) for head in range(shape.kv_heads)])
    found = TorchCodedAttention(torch.device(device)).exact_blocks(
        torch.from_numpy(products).to(device), torch.from_numpy(rows.values).to(device)
    )
    for head in range(shape.kv_heads):
        for block, first in enumerate(range(0, count, 64)):
            own = slice(first, first + 64)
            expected = exact_block(products[head, :, own], rows.values[own, head])
            assert same_block(found, block, head, expected)
            found.outputs.view(torch.int32)[block, head, 0, 0] ^= 1
            assert not same_block(found, block, head, expected)


@every_device
@pytest.mark.parametrize("exponents", [(0, 1), (4, 13), (0, 22), (0, 255), (254, 255)])
@pytest.mark.parametrize("spread", [0.0, 0.01, 6.0, 40.0, 30000.0])
def test_coded_blocks(device, exponents, spread):
    segment = coded_segment(shape_of(2, 3, 64), 130, exponents=exponents, spread=spread)
    generator = np.random.default_rng(3)
    segment.statistics.exponents[:] = generator.integers(-14, 17, (2, 64))
    segment.statistics.means[:] = generator.integers(-(2**23) + 1, 2**23, (2, 64))
    segment.aligned[0, :3] = 2**31 - 1, -(2**31), 2**23
    found = TorchCodedAttention(torch.device(device)).coded_blocks([on(device, segment)])
    for head in range(2):
        for block in range(3):
            expected = golden_coded_block(segment, head, block * 64)
            assert same_block(found, block, head, expected)
    found.totals[2, 1, 2] ^= 1
    assert not same_block(found, 2, 1, expected)


# --- One softmax ---


@every_device
@every_shape
@pytest.mark.parametrize(
    ("exact", "coded"), [(1, ()), (70, (65, 0, 300)), (0, (1,)), (3, (64, 128)), (130, (1, 1, 1))]
)
def test_attention_over_both(device, shape, exact, coded):
    layer = Layer(shape, exact, coded)
    expected = golden_of(layer)
    assert same_bits(attended(device, layer), expected)
    if coded:
        for one in layer.segments:
            one.codes.codes[:] = np.maximum(one.codes.codes - 1, -7)
        assert not same_bits(attended(device, layer), expected)


@every_device
def test_blocks_far_below_the_largest_add_nothing(device):
    layer = Layer(shape_of(2, 2, 64), 5, (70, 70, 70), spread=2.0)
    for number, below in enumerate((39, 40, 41)):
        layer.segments[number].aligned -= below * 256
    layer.segments[0].aligned[1] += 80 * 256
    expected = golden_of(layer)
    assert same_bits(attended(device, layer), expected)
    layer.segments[0].aligned[1] -= 80 * 256
    assert not same_bits(attended(device, layer), expected)


@every_device
@pytest.mark.parametrize("scale", [0.0, 1e-30, 300.0, 1e5])
def test_products_at_their_limits(device, scale):
    layer = Layer(shape_of(1, 3, 80, StoredType.FLOAT16), 67, (5,))
    layer.scaled *= np.float32(scale)
    assert same_bits(attended(device, layer), golden_of(layer))


@every_device
def test_what_cannot_be_told_is_nan(device):
    layer = Layer(shape_of(2, 2, 64), 70, (70, 70))
    layer.segments[0].codes.exponents[3, 1] = INVALID_EXPONENT
    layer.segments[0].codes.codes[3, 1] = 0
    found, expected = attended(device, layer), golden_of(layer)
    assert same_bits(found, expected)
    assert np.isnan(found[2:]).all()
    assert np.isfinite(found[:2]).all()
    layer.segments[1].invalid_keys[69, 0] = True
    found = attended(device, layer)
    assert same_bits(found, golden_of(layer))
    assert np.isnan(found).all()


def test_no_token_and_odd_heads():
    shape = shape_of(2, 2, 64)
    layer = Layer(shape, 1, (0,))
    attention = TorchCodedAttention(torch.device("cpu"))
    nothing = torch.zeros(0, 2, 64)
    with pytest.raises(ValueError, match="needs a token"):
        attention.attend(torch.from_numpy(layer.scaled), nothing, nothing, [])
    with pytest.raises(ValueError, match="evenly"):
        attention.attend(torch.zeros(3, 64), nothing, nothing, [])


# --- Value codes ---


def coded_alike(device, values, first, preceding=None, given=None):
    """Whether torch codes values as golden codes `given`."""
    bits = (values if given is None else given).numpy().view(np.uint16)
    golden = value_codes.value_statistics(bits, first, 1024, preceding)
    expected = value_codes.encode_values(bits, golden)
    before = preceding and tuple(
        torch.from_numpy(one).to(device) for one in (preceding.exponents, preceding.means)
    )
    statistics = value_statistics(values.to(device), first, 1024, before)
    codes, exponents = encode_values(values.to(device), statistics)
    return (
        np.array_equal(statistics[0].cpu(), golden.exponents)
        and np.array_equal(statistics[1].cpu(), golden.means)
        and np.array_equal(codes.cpu(), expected.codes)
        and np.array_equal(exponents.cpu(), expected.exponents)
    )


def random_values(seed, tokens, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((tokens, 2, 64), generator=generator) * spread
    return (values + torch.randn((2, 64), generator=generator)).half()


@every_device
@pytest.mark.parametrize(("tokens", "first"), [(20, 0), (36, 0), (1024, 0), (512, 1024)])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 3e4])
def test_values_are_coded_as_golden_codes_them(device, tokens, first, spread):
    values = random_values(tokens, tokens, spread)
    values[5, 1, 7] = torch.nan
    values[6, 0, 0] = torch.inf
    values[7, 0, 1] = -torch.inf
    preceding = None
    if first:
        preceding = ChannelStatistics(np.zeros((2, 64), np.int8), np.zeros((2, 64), np.int32))
    assert coded_alike(device, values, first, preceding)
    other = values.clone()
    other.view(torch.int16)[9] ^= 1 << 14
    assert not coded_alike(device, other, first, preceding, given=values)


@every_device
def test_any_sixteen_bits(device):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    # Alike ones together, and unlike ones.
    for segments in (every.view(64, 1024), every.view(1024, 64)[::16]):
        for values in segments:
            assert coded_alike(device, values.reshape(-1, 1, 1), 0)


def test_few_tokens_take_the_statistics_before():
    values = random_values(1, 40)
    before = value_codes.value_statistics(
        random_values(2, 1024).numpy().view(np.uint16), 0, 1024, None
    )
    assert coded_alike("cpu", values, 1024, before)
    with pytest.raises(ValueError, match="too few"):
        value_statistics(values, 1024, 1024, None)
    with pytest.raises(ValueError, match="none precedes"):
        value_statistics(values, 0, 1024, (values, values))
    with pytest.raises(ValueError, match="one segment"):
        value_statistics(values, 1000, 1024, None)
