# SPDX-License-Identifier: Apache-2.0
"""Faults in the arithmetic of the golden model."""

from __future__ import annotations

from mutants.mutant import Mutant

_GOLDEN = "sw_model/hillinfer_model"
_INTEGERS = ("tests/sw_model/test_golden_integers.py",)
_KEYS = ("tests/sw_model/test_golden_keys.py",)
_SCORES = ("tests/sw_model/test_golden_scores.py",)
_LAUNCHES = ("tests/sw_model/test_golden_launch.py",)
_VALUES = ("tests/sw_model/test_oracle_values.py",)
_ATTENTION = ("tests/sw_model/test_oracle_attention.py",)

GOLDEN: tuple[Mutant, ...] = (
    Mutant(
        "golden-rounds-down",
        "Alignment drops the bits behind the point and does not round.",
        f"{_GOLDEN}/integers.py",
        "half = (np.int64(1) << right) >> 1",
        "half = np.int64(0) << right",
        _INTEGERS,
    ),
    Mutant(
        "golden-ties-up",
        "A tie rounds up though the number below is even.",
        f"{_GOLDEN}/integers.py",
        "tie = (rest == unit - rest) & ((floor & 1) == 1)",
        "tie = rest == unit - rest",
        _INTEGERS,
    ),
    Mutant(
        "golden-clamp-one-side",
        "Negative values are not limited.",
        f"{_GOLDEN}/integers.py",
        "return np.clip(values, -limit, limit)",
        "return np.minimum(values, limit)",
        _INTEGERS,
    ),
    Mutant(
        "golden-centre-not-limited",
        "A key far above its channel's mean is not limited to 24 bits.",
        f"{_GOLDEN}/key_codes.py",
        "np.minimum(magnitude, CENTRED_LIMIT)",
        "magnitude",
        _KEYS,
    ),
    Mutant(
        "golden-nan-lost",
        "A NaN does not make its token invalid.",
        f"{_GOLDEN}/key_codes.py",
        "np.where(invalid, INVALID_EXPONENT, exponents)",
        "np.where(False, INVALID_EXPONENT, exponents)",
        _KEYS,
    ),
    Mutant(
        "golden-product-corner",
        "An aligned product of exactly -2^23 is not limited.",
        f"{_GOLDEN}/scores.py",
        "clamp(shift_half_up(products, shift), PRODUCT_LIMIT)",
        "np.clip(shift_half_up(products, shift), -PRODUCT_LIMIT - 1, PRODUCT_LIMIT)",
        _SCORES,
    ),
    Mutant(
        "golden-weight-limit",
        "Weights are limited from 2^25 on, not from 2^24.",
        f"{_GOLDEN}/scores.py",
        "np.where(integer >= ONE_BITS, WEIGHT_LIMIT, finite)",
        "np.where(integer > ONE_BITS, WEIGHT_LIMIT, finite)",
        _SCORES,
    ),
    Mutant(
        "golden-sum-not-limited",
        "A sum of weights is not limited to 48 bits.",
        f"{_GOLDEN}/scores.py",
        "np.minimum(scope_sums(weights, spec, scope), WEIGHT_LIMIT)",
        "scope_sums(weights, spec, scope)",
        ("tests/sw_model/test_oracle_scores.py::test_weight_sum_saturates",),
    ),
    Mutant(
        "golden-invalid-in-all-heads",
        "A token is invalid only where the keys of all KV heads are.",
        f"{_GOLDEN}/scores.py",
        "np.asarray(invalid.any(axis=1))",
        "np.asarray(invalid.all(axis=1))",
        _SCORES,
    ),
    Mutant(
        "golden-padding",
        "Bytes behind a block's content are not zero.",
        f"{_GOLDEN}/beats.py",
        "block = np.zeros((beat_count(len(content)), BEAT_BYTES), dtype=np.uint8)",
        "block = np.ones((beat_count(len(content)), BEAT_BYTES), dtype=np.uint8)",
        _LAUNCHES,
    ),
    Mutant(
        "golden-goes-on",
        "A launch goes on behind a wrong descriptor.",
        f"{_GOLDEN}/golden_launch.py",
        """        if error is not ErrorCode.NONE:
            break
""",
        "",
        _LAUNCHES,
    ),
    Mutant(
        "golden-value-halves-swapped",
        "The halves of 32 channels change places in a code row.",
        f"{_GOLDEN}/value_layout.py",
        "halves[:, :, 0] | halves[:, :, 1] << 4",
        "halves[:, :, 1] | halves[:, :, 0] << 4",
        _VALUES,
    ),
    Mutant(
        "golden-kept-not-exact",
        "Kept tokens beyond the exact share are coded.",
        f"{_GOLDEN}/selection.py",
        "return min(selected, max(kept, floor, wanted))",
        "return min(selected, max(floor, wanted))",
        _VALUES,
    ),
    Mutant(
        "golden-fma-rounds-twice",
        "A fused multiplication and addition rounds to float64 and then to float32.",
        f"{_GOLDEN}/floats.py",
        "(lost != 0) & even & np.isfinite(total)",
        "(lost != 0) & even & np.isnan(total)",
        _ATTENTION,
    ),
    Mutant(
        "golden-lanes-neighbours",
        "Lanes are added as neighbours and not as halves.",
        f"{_GOLDEN}/floats.py",
        "sums[:, :, :half] + sums[:, :, half:]",
        "sums[:, :, ::2] + sums[:, :, 1::2]",
        _ATTENTION,
    ),
    Mutant(
        "golden-power-not-interpolated",
        "Weights of rows have no bits between the steps of the table.",
        f"{_GOLDEN}/coded_attention.py",
        "(steps * rest + 128) >> 8",
        "(steps * 0 + 128) >> 8",
        _ATTENTION,
    ),
    Mutant(
        "golden-addend-cut",
        "Weights of coded tokens are cut and not rounded.",
        f"{_GOLDEN}/coded_attention.py",
        "(mantissa + (np.int64(1) << (shift - 1))) >> shift",
        "mantissa >> shift",
        _ATTENTION,
    ),
    Mutant(
        "golden-far-block-counts",
        "A block 41 powers of two below the largest counts as if 40 below.",
        f"{_GOLDEN}/coded_attention.py",
        "counts = below <= -LEAST_POWER",
        "counts = below <= -LEAST_POWER + 1",
        _ATTENTION,
    ),
    Mutant(
        "golden-invalid-value-hidden",
        "A coded value with a NaN leaves its heads' outputs finite.",
        f"{_GOLDEN}/coded_attention.py",
        "bool(values.invalid.any())",
        "False",
        _ATTENTION,
    ),
)
