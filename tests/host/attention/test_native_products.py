# SPDX-License-Identifier: Apache-2.0
"""Inner products and weighted sums over rows where they lie, against float64."""

import numpy as np
import pytest
import torch
from native_cases import Rows, shape_of

from hillinfer.model_shape import StoredType
from hillinfer.native.structures import row_addresses
from hillinfer_bench.rivals.block_attention import NativeProducts, RowProducts, native_products

CASES = [(1, 1, 16, 1), (3, 3, 64, 130), (2, 5, 40, 63), (8, 3, 128, 700), (4, 1, 38, 65)]
every_case = pytest.mark.parametrize("case", CASES)
every_type = pytest.mark.parametrize("stored_type", StoredType)


@pytest.fixture(params=["native", "torch"])
def products_of(request):
    if request.param == "torch":
        return lambda shape: RowProducts(shape, 50, lambda _: None)
    return lambda shape: RowProducts(shape, 50)


def exact_logits(rows, shape):
    query = rows.query.double().view(shape.kv_heads, -1, shape.head_dim) * rows.scaling
    return (query @ rows.keys.double().transpose(1, 2)).reshape(shape.query_heads, -1)


def exact_sums(rows, shape, weights):
    grouped = weights.double().view(shape.kv_heads, -1, weights.shape[1])
    return (grouped @ rows.values.double()).reshape(shape.query_heads, -1)


@every_case
@every_type
def test_inner_products(case, stored_type, products_of):
    kv_heads, group, head_dim, count = case
    shape = shape_of(kv_heads, group, head_dim, stored_type)
    rows = Rows(shape, count)
    # A part of a wider table, as rivals give it.
    table = torch.full((shape.query_heads, count + 9), torch.nan)
    out = table[:, 4 : 4 + count]
    query = rows.query[:, None]
    products_of(shape).logits(query, rows.scaling, rows.memory, rows.places, out)
    assert (out - exact_logits(rows, shape)).abs().max() < 1e-3
    assert table[:, :4].isnan().all()
    assert table[:, 4 + count :].isnan().all()
    before = out.clone()
    # The exponent's highest bit of the last key's last item.
    rows.memory[rows.places[-1], 2 * kv_heads * head_dim - 1] ^= 0x40
    products_of(shape).logits(query, rows.scaling, rows.memory, rows.places, out)
    changed = (out != before) & ~(out.isnan() & before.isnan())
    assert changed[-group:, -1].all()
    assert not changed[:, :-1].any()
    assert not changed[:-group].any()


@every_case
@every_type
def test_weighted_sums(case, stored_type, products_of):
    kv_heads, group, head_dim, count = case
    shape = shape_of(kv_heads, group, head_dim, stored_type)
    rows = Rows(shape, count)
    weights = torch.rand(shape.query_heads, count + 3)[:, :count]
    out = torch.ones(shape.query_heads, head_dim)
    start = 2 * kv_heads * head_dim
    products_of(shape).add_weighted(weights, rows.memory, rows.places, out, start)
    wanted = exact_sums(rows, shape, weights) + 1
    assert (out - wanted).abs().max() < 1e-4 * max(1, count)
    # Every row counts: the twin leaves the last one out.
    others = torch.ones(shape.query_heads, head_dim)
    products_of(shape).add_weighted(weights[:, :-1], rows.memory, rows.places[:-1], others, start)
    assert not torch.equal(out, others)


@pytest.fixture
def _own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_own_threads")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    shape = shape_of(3, 3, 64)
    rows = Rows(shape, 1500)
    weights = torch.rand(shape.query_heads, 1500)
    found = []
    for count in (2, threads):
        torch.set_num_threads(count)
        out, sums = torch.empty(shape.query_heads, 1500), torch.zeros(shape.query_heads, 64)
        products = NativeProducts(shape)
        products.logits(rows.query, rows.scaling, rows.addresses, out)
        products.add_weighted(weights, rows.addresses, sums)
        found.append((out, sums))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_does_not_fit_is_refused():
    assert native_products(shape_of(1, 129, 16)) is None
    shape = shape_of(2, 2, 16)
    products = native_products(shape)
    if products is None:
        pytest.skip("no native library: run python tools/build_native.py")
    rows = row_addresses(np.zeros((3, shape.row_bytes), np.uint8), np.arange(3))
    with pytest.raises(ValueError, match="query of shape"):
        products.logits(torch.zeros(3, 16), 1.0, rows, torch.zeros(4, 3))
    with pytest.raises(ValueError, match="last dimension dense"):
        products.logits(torch.zeros(4, 16), 1.0, rows, torch.zeros(3, 4).T)
    with pytest.raises(ValueError, match="a table"):
        products.add_weighted(torch.zeros(4, 2), rows, torch.zeros(4, 16))
    with pytest.raises(ValueError, match="sums of shape"):
        products.add_weighted(torch.zeros(4, 3), rows, torch.zeros(4, 8))
