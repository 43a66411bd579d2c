// SPDX-License-Identifier: Apache-2.0
// Types of numbers that the library is given, and those of 16 bits from those of 32 bits and back.
#pragma once
#include <cstdint>

namespace hillinfer {

enum NumberType : int32_t { kFloat32Numbers = 0, kBfloat16Numbers = 1, kFloat16Numbers = 2 };

inline constexpr uint16_t kHalfInfinity = 0x7C00;
inline constexpr uint16_t kLargestHalf = 0x7BFF;
// From here on a number rounds to no finite half.
inline constexpr uint32_t kTooLarge = 0x477FF000;
inline constexpr uint32_t kFloatInfinity = 0x7F800000;

// Rounds to the nearest bfloat16, ties to even; what is no number stays none.
inline uint16_t bfloat16_of(uint32_t bits) {
    if ((bits & 0x7FFFFFFF) > kFloatInfinity) {
        return uint16_t(bits >> 16 | 0x40);
    }
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// On bits: the compiler is told that no number is infinite. Rounds to the nearest, ties to even.
inline uint16_t half_of(uint32_t bits) {
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > kFloatInfinity) {
        return uint16_t(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    }
    if (magnitude >= kTooLarge) {
        return sign | kHalfInfinity;
    }
    if (magnitude >= 0x38800000) {
        return uint16_t(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
    }
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) {
        return sign;
    }
    const uint32_t mantissa = (magnitude & 0x7FFFFF) | 0x800000;
    const uint32_t shift = 126 - exponent;
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    uint32_t whole = mantissa >> shift;
    whole += rest > half || (rest == half && (whole & 1));
    return uint16_t(sign | whole);
}

inline uint32_t float_of_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31;
    uint32_t mantissa = half & 0x3FF;
    if (exponent == 31) {
        return sign | kFloatInfinity | mantissa << 13;
    }
    if (exponent) {
        return sign | (exponent + 112) << 23 | mantissa << 13;
    }
    if (!mantissa) {
        return sign;
    }
    uint32_t shifted = 113;
    while (!(mantissa & 0x400)) {
        mantissa <<= 1;
        --shifted;
    }
    return sign | shifted << 23 | (mantissa & 0x3FF) << 13;
}

}  // namespace hillinfer
