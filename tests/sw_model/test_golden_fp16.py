# SPDX-License-Identifier: Apache-2.0
import golden_scalar as scalar
import numpy as np
import pytest

from hillinfer_model.fp16 import decode

ALL_CODES = np.arange(65_536, dtype=np.uint16)
ALL = decode(ALL_CODES)
NUMBERS = ALL_CODES.view(np.float16).astype(np.float64)


def test_every_finite_code_has_its_ieee_value():
    finite = np.isfinite(NUMBERS)
    values = ALL.sign * np.ldexp(ALL.magnitude.astype(np.float64), ALL.exponent - 25)
    assert np.array_equal(values[finite], NUMBERS[finite])
    assert finite.sum() == 65_536 - 2 * 1024


def test_every_code_equals_the_scalar_restatement():
    expected = [scalar.parts(int(code)) for code in ALL_CODES]
    found = list(zip(ALL.sign.tolist(), ALL.magnitude.tolist(), ALL.exponent.tolist(), strict=True))
    # -0 has the parts of +0.
    expected[0x8000] = (1, 0, 1)
    assert found == expected
    found[0x3C00] = (1, 1025, 15)
    assert found != expected


def test_types_and_shape():
    parts = decode(ALL_CODES.reshape(2, 128, 256))
    for array in (parts.sign, parts.magnitude, parts.exponent):
        assert array.dtype == np.int64
        assert array.shape == (2, 128, 256)
    assert parts.is_nan.dtype == np.bool_


def test_infinities_count_as_the_largest_numbers():
    parts = decode(np.array([0x7C00, 0xFC00, 0x7BFF, 0xFBFF], dtype=np.uint16))
    assert parts.sign.tolist() == [1, -1, 1, -1]
    assert parts.magnitude.tolist() == [2047] * 4
    assert parts.exponent.tolist() == [30] * 4
    assert not parts.is_nan.any()


def test_exactly_the_nans_are_nan():
    assert np.array_equal(ALL.is_nan, np.isnan(NUMBERS))
    assert ALL.is_nan.sum() == 2 * 1023
    assert not ALL.magnitude[ALL.is_nan].any()


def test_no_tokens():
    assert decode(np.zeros((0, 2, 4), dtype=np.uint16)).sign.shape == (0, 2, 4)


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.int64])
def test_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match=r"uint16"):
        decode(np.zeros(3, dtype=dtype))
