// SPDX-License-Identifier: Apache-2.0
// The contract's arithmetic, one number at a time (scoring contract, sections 2 to 7).
//
// Everything has internal linkage: each instruction set's file compiles its own copy, and the
// linker must not mix them.
//
// Where a float stands for an integer it is exact: products and aligned products are below 2^24,
// a power of two only moves the exponent, and weights have nine significant bits.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr float kProductLimit = 8388607.0f;  // 2^23 - 1
constexpr double kSumLimit = 281474976710655.0;  // 2^48 - 1
constexpr int32_t kProductMax = (1 << 23) - 1;
// Below every L', far enough that a weight relative to any of them is 0.
constexpr int32_t kLeftOut = -(1 << 27);

inline float float_of_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline double double_of_bits(int64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int64_t bits_of_double(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline int32_t clamp_int(int32_t value, int32_t low, int32_t high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

inline float clamp_float(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

// 2^nu of the alignment, nu = s_h + t - 6 limited to +-24 (section 5).
inline float alignment(int32_t query_exponent, int32_t token_exponent) {
    return float_of_bits((clamp_int(query_exponent + token_exponent - 6, -24, 24) + 127) << 23);
}

// L from P: floor(P * 2^nu + 1/2) is the contract's (P + half) >> -nu, and where nu >= 0 the half
// falls off again or, from 2^23 on, vanishes behind the limit.
inline int32_t aligned(int32_t product, float scale) {
    const float value = __builtin_floorf(float(product) * scale + 0.5f);
    return int32_t(clamp_float(value, -kProductLimit, kProductLimit));
}

// w of Z. (256 + f) << (I + 16) has the bits of Z = 256 * I + f right behind a float's sign, and
// the floor is the contract's right shift. 2^48 stands for 2^48 - 1: the limit on the sum makes
// them equal.
inline float weight(int32_t z) {
    z = clamp_int(z, -26 * 256, 24 * 256);
    return __builtin_floorf(float_of_bits((z + ((24 + 127) << 8)) << 15));
}

// mag(v) for 0 <= v < 2^48, an integer: its bit length and the ten bits behind the first.
inline int32_t magnitude(double value) {
    const int32_t large = int32_t(bits_of_double(value) >> 42) - ((1023 + 9) << 10);
    const int32_t small = int32_t(value < 1024.0 ? value : 0.0);
    return value < 1024.0 ? small : large;
}

// The same for 0 <= v < 2^31. From 2^24 on a float would round; the seven bits that are taken away
// lie behind the eleven that count.
inline int32_t magnitude(int32_t value) {
    const int32_t exact = value < (1 << 24) ? value : value & ~127;
    int32_t bits;
    const float real = float(exact);
    std::memcpy(&bits, &real, sizeof bits);
    const int32_t large = (bits >> 13) - ((127 + 9) << 10);
    return value < 1024 ? value : large;
}

inline int32_t weight_sum_code(double sum) {
    return 1 + magnitude(sum > kSumLimit ? kSumLimit : sum);
}

// Of a sum far below the limit.
inline int32_t weight_sum_code(int32_t sum) { return 1 + magnitude(sum); }

inline int32_t raw_sum_code(int32_t value) {
    // ~V is -V - 1.
    const int32_t code = magnitude(value < 0 ? ~value : value);
    return value < 0 ? 32767 - code : 32768 + code;
}

inline int64_t floor_divide(int64_t value, int64_t by) {
    const int64_t quotient = value / by;
    return quotient - (value % by < 0 ? 1 : 0);
}

}  // namespace
