# SPDX-License-Identifier: Apache-2.0
from itertools import combinations, product

import pytest
from pairwise import pairwise


@pytest.mark.parametrize(
    "sizes", [(3,), (2, 3), (8, 4, 2, 2, 30), (1, 1, 1), (5, 5, 5, 5)], ids=str
)
def test_every_pair_occurs_in_few_rows(sizes):
    factors = [[f"{factor}:{value}" for value in range(size)] for factor, size in enumerate(sizes)]
    rows = pairwise(factors)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(factors[a], factors[b]))
    largest = sorted(sizes)[-2:]
    least = largest[0] * largest[-1] if len(sizes) > 1 else 0
    assert least <= len(rows) <= 2 * least


def test_a_row_less_leaves_a_pair_out():
    factors = [[0, 1], [0, 1], [0, 1]]
    rows = pairwise(factors)
    pairs = {(a, b) for a, b, _ in rows[:-1]} | {(a, c + 2) for a, _, c in rows[:-1]}
    pairs |= {(b + 2, c + 4) for _, b, c in rows[:-1]}
    assert len(pairs) < 12
