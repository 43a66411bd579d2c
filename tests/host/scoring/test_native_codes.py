# SPDX-License-Identifier: Apache-2.0
"""Score codes where a sum has more bits than a float holds."""

import numpy as np
import pytest
from native_variants import every_variant, native_scorer

from hillinfer_model.choices import Rule, Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec


def magnitude(value):
    """mag(v) of the contract's section 7, in Python's integers."""
    length = value.bit_length()
    return value if value < 1024 else ((length - 10) << 10) | ((value >> (length - 11)) & 1023)


def raw_code(value):
    return 32768 + magnitude(value) if value >= 0 else 32767 - magnitude(-value - 1)


def raw_codes(scorer, log_weights):
    """Codes of one group whose L' are given, all valid."""
    exponents = np.zeros(GROUP_TOKENS, np.uint8)
    tuples = np.zeros(GROUP_TOKENS, np.uint32)
    scorer._library.call(
        "hillinfer_finish",
        scorer.variant.number,
        scorer._sequence(None, None),
        GROUP_TOKENS,
        log_weights.ctypes.data,
        exponents.ctypes.data,
        tuples.ctypes.data,
    )
    return [int(one) >> 16 for one in tuples]


def around_powers(lowest, step):
    """Pairs v and -v, so that A is 0: right below each power of two, where rounding would carry."""
    sizes = [2**bits - 1 - step for bits in range(lowest, lowest + 16)]
    sizes += [2**bits + step for bits in range(lowest, lowest + 16)]
    return np.array([sign * size for size in sizes for sign in (1, -1)], np.int32)


@every_variant
@pytest.mark.parametrize("lowest", [0, 9, 15])
@pytest.mark.parametrize("step", [0, 1, 63, 127, 128])
def test_codes_are_truncated_never_rounded(step, lowest, variant):
    scorer = native_scorer(variant, KernelSpec(16, 1, 1, rule=Rule.RAW_SUM), Scope.LAYER)
    values = around_powers(lowest, step)
    expected = [raw_code(int(value)) for value in values]
    assert raw_codes(scorer, values) == expected
    values[0] ^= 1 << 20
    assert raw_codes(scorer, values) != expected
