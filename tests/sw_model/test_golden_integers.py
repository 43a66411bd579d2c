# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction

import golden_scalar as scalar
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hillinfer_model.integers import (
    bit_length,
    clamp,
    rne_divide,
    rne_shift_right,
    shift_half_up,
)

WIDE = st.integers(-(2**62), 2**62)


def test_bit_length_at_every_power_of_two():
    values = sorted({max(2**k + d, 0) for k in range(63) for d in (-1, 0, 1)})
    found = bit_length(np.array(values, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [value.bit_length() for value in values]


def test_bit_length_is_not_that_of_a_rounded_float():
    # What one frexp of the whole would say, the reason for two halves.
    assert np.frexp(np.float64(2**62 - 1))[1] == 63
    assert bit_length(2**62 - 1) == 62


def test_bit_length_refuses_negative_values():
    with pytest.raises(ValueError, match="-3"):
        bit_length(np.array([1, -3]))


def test_bit_length_of_nothing_is_nothing():
    assert bit_length(np.zeros((0, 3), dtype=np.int64)).shape == (0, 3)


@settings(max_examples=300, deadline=None)
@given(WIDE, st.integers(0, 62))
def test_rne_shift_right_rounds_half_to_even(value, shift):
    assert int(rne_shift_right(value, shift)) == round(Fraction(value, 2**shift))


@pytest.mark.parametrize("shift", [1, 2, 30, 61, 62])
def test_rne_shift_right_at_ties(shift):
    half = 2 ** (shift - 1)
    values = [k * half + d for k in (-3, -1, 1) for d in (-1, 0, 1)]
    found = rne_shift_right(np.array(values, dtype=np.int64), shift)
    assert found.tolist() == [round(Fraction(value, 2**shift)) for value in values]
    # The twin: half up differs on these values, so the ties are really visited.
    assert found.tolist() != [(value + half) >> shift for value in values]


def test_rne_shift_right_takes_a_shift_per_value():
    assert rne_shift_right(np.array([[3, 5], [6, -6]]), np.array([0, 1])).tolist() == [
        [3, 2],
        [6, -3],
    ]


@pytest.mark.parametrize("shift", [-1, 63])
def test_rne_shift_right_refuses_other_shifts(shift):
    with pytest.raises(ValueError, match=str(shift)):
        rne_shift_right(5, shift)


@settings(max_examples=300, deadline=None)
@given(WIDE, st.integers(1, 65_536))
def test_rne_divide_rounds_half_to_even(value, divisor):
    expected = round(Fraction(value, divisor))
    assert int(rne_divide(value, divisor)) == expected
    assert scalar.halves_to_even(value, divisor) == expected


def test_rne_divide_at_ties():
    values = [-15, -9, -5, -3, 3, 5, 9, 15]
    expected = [-2, -2, -1, 0, 0, 1, 2, 2]
    assert rne_divide(np.array(values), 6).tolist() == expected
    assert [scalar.halves_to_even(value, 6) for value in values] == expected


def test_rne_divide_refuses_zero():
    with pytest.raises(ValueError, match="divisor 0"):
        rne_divide(3, 0)


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**38), 2**38), st.integers(-40, 24))
def test_shift_half_up(value, shift):
    found = int(shift_half_up(np.array(value), np.array(shift)))
    assert found == (value * 2**shift if shift >= 0 else (value + 2 ** (-shift - 1)) >> -shift)


def test_shift_half_up_rounds_ties_up():
    assert shift_half_up(np.array([-3, -1, 1, 3]), np.array(-1)).tolist() == [-1, 0, 1, 2]


def test_clamp():
    assert clamp(np.array([-9, -8, 0, 8, 9]), 8).tolist() == [-8, -8, 0, 8, 8]
