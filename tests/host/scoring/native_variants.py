# SPDX-License-Identifier: Apache-2.0
"""The native scorer's variants that this machine has, one test parameter each."""

import pytest

from hillinfer.native.library import NativeError, Variant, native_library
from hillinfer.scoring.native import NativeScorer


def native_scorer(variant, spec, scope):
    """A scorer that uses one variant, or a skip that says what is missing."""
    try:
        library = native_library()
    except NativeError as error:
        pytest.skip(str(error))
    if variant not in library.variants:
        pytest.skip(f"this processor has no {variant.value}")
    return NativeScorer(spec, scope, variant)


def _variants():
    try:
        return native_library().variants
    except NativeError:
        # Each test says why.
        return tuple(Variant)


# Which ones it lacks one test of each says, in test_native_scorer.py: hundreds that do take longer.
VARIANTS = _variants()
every_variant = pytest.mark.parametrize("variant", VARIANTS)
