// SPDX-License-Identifier: Apache-2.0
// Query codes and mean correction of one segment (scoring contract, section 4).
#pragma once
#include "contract.h"
#include "shape.h"

namespace {

// 2^e for -1022 <= e <= 1023.
inline double power_of_two(int32_t exponent) { return double_of_bits(int64_t(exponent + 1023) << 52); }

// s_h: the frexp exponent of the largest weighted value less 7, as int8; -7 for a zero query.
inline int32_t query_exponent(double largest) {
    // A float32 times 2^-14 and more is never a subnormal double.
    const int32_t exponent = largest > 0 ? int32_t(bits_of_double(largest) >> 52) - 1022 : 0;
    return clamp_int(exponent - 7, -128, 127);
}

inline int32_t mean_correction(int64_t sum, int32_t exponent) {
    const int32_t nu = clamp_int(exponent - 6, -40, 24);
    // |sum| < 2^38, so neither way leaves int64.
    const int64_t moved = nu >= 0 ? sum * (int64_t(1) << nu)
                                  : (sum + (int64_t(1) << (-nu - 1))) >> -nu;
    return int32_t(moved > kProductMax ? kProductMax : moved < -kProductMax ? -kProductMax : moved);
}

inline void code_row(const float* __restrict scaled, const double* __restrict units,
                     const int32_t* __restrict means, int channels, int8_t* __restrict codes,
                     int32_t* exponent, int32_t* correction, int32_t* sum) {
    constexpr int kMost = 256;
    alignas(64) double weighted[kMost];
    alignas(64) int32_t wide[kMost];
    // Bits of non-negative doubles order as the numbers do, and integers have a largest one that
    // the compiler may find in any order.
    int64_t largest = 0;
    for (int i = 0; i < channels; ++i) {
        weighted[i] = double(scaled[i]) * units[i];
        const int64_t bits = bits_of_double(weighted[i]) & INT64_MAX;
        largest = bits > largest ? bits : largest;
    }
    *exponent = query_exponent(double_of_bits(largest));
    const double unit = power_of_two(-*exponent);
    for (int i = 0; i < channels; ++i) {
        const double code = __builtin_rint(weighted[i] * unit);
        wide[i] = int32_t(code < -127.0 ? -127.0 : code > 127.0 ? 127.0 : code);
    }
    int64_t moved = 0;
    int32_t total = 0;
    for (int i = 0; i < channels; ++i) {
        codes[i] = int8_t(wide[i]);
        total += wide[i];
        // |code * M| < 2^30.
        moved += int64_t(wide[i] * means[i]);
    }
    *correction = mean_correction(moved, *exponent);
    *sum = total;
}

void code_query(const hillinfer::Shape& shape, const float* scaled,
                const hillinfer::Segment& segment, const hillinfer::QueryCodes& out) {
    for (int head = 0, row = 0; head < shape.kv_heads; ++head) {
        const int8_t* exponents = segment.exponents + size_t(head) * shape.head_dim;
        alignas(64) double units[256];
        for (int i = 0; i < shape.head_dim; ++i) {
            units[i] = power_of_two(exponents[i]);
        }
        for (int i = 0; i < shape.heads; ++i, ++row) {
            int8_t* codes = out.codes + size_t(row) * shape.padded_dim;
            code_row(scaled + size_t(row) * shape.head_dim, units,
                     segment.means + size_t(head) * shape.head_dim, shape.head_dim, codes,
                     &out.exponents[row], &out.corrections[row], &out.sums[row]);
            std::memset(codes + shape.head_dim, 0, size_t(shape.padded_dim - shape.head_dim));
        }
    }
}

}  // namespace
