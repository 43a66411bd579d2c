# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that the native library has code for."""

from __future__ import annotations

from enum import StrEnum


class Variant(StrEnum):
    """What the native library multiplies with; results are the same bits for each."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512_VNNI = "avx512vnni"
    NEON = "neon"

    @property
    def number(self) -> int:
        """Its number in the library's C interface."""
        return _NUMBERS[self]


_NUMBERS = {variant: number for number, variant in enumerate(Variant)}
# Fastest first.
PREFERENCE = (Variant.AVX512_VNNI, Variant.AVX2, Variant.NEON, Variant.PORTABLE)
