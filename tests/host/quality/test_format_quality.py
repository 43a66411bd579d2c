# SPDX-License-Identifier: Apache-2.0
"""Formats are compared text by text: what texts differ from each other by falls out."""

import pytest

from format_quality import Difference, compare
from hillinfer_bench.quality.table import Measures


def measures(*divergences):
    return [Measures(2.0 + 10 * one, one, 1 - one) for one in divergences]


def test_a_difference_is_that_of_each_text():
    own = Difference.of([0.3, 1.1, 5.2], [0.2, 1.0, 5.0])
    assert own.mean == pytest.approx(0.4 / 3)
    # Texts are far apart; the differences are .1, .1 and .2.
    assert own.standard_error == pytest.approx((0.02 / 3 / 2 / 3) ** 0.5)
    assert own.above == 3
    mixed = Difference.of([0.3, 1.1, 5.2], [0.2, 5.0, 1.0])
    assert mixed.standard_error > 10 * own.standard_error


def test_every_format_against_the_first():
    made = compare({"int8": measures(0.1, 0.2), "int4": measures(0.1, 0.4), "int2": measures(0, 0)})
    assert list(made) == ["int4 - int8", "int2 - int8"]
    differences = made["int4 - int8"]
    assert differences["kl_divergence"] == Difference(pytest.approx(0.1), pytest.approx(0.1), 1)
    assert differences["negative_log_likelihood"].mean == pytest.approx(1.0)
    assert differences["agreement"].mean == pytest.approx(-0.1)
    assert differences["agreement"].above == 0
    assert made["int2 - int8"]["kl_divergence"].above == 0
