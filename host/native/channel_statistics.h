// SPDX-License-Identifier: Apache-2.0
// Channel statistics from FP16 keys (scoring contract, section 3).
//
// X, a key in units of 2^-24, has 11 significant bits and is exact in float32; |X| < 2^40 and
// |X - mean| < 2^41, so a double adds 2,048 of them without rounding, and int64 adds those sums.
#pragma once
#include "contract.h"
#include "kernels.h"

namespace {

using hillinfer::kStatisticsChannels;

constexpr int64_t kExactTokens = 2048;

// One key's channels, gaps between them left out.
struct KeyRows {
    const uint16_t* keys;
    int64_t token_stride;
    int64_t channel_stride;
    int channels;

    // `scratch` has room for kStatisticsChannels codes.
    const uint16_t* row(int64_t token, uint16_t* scratch) const {
        const uint16_t* key = keys + token * token_stride;
        if (channel_stride == 1) {
            return key;
        }
        for (int i = 0; i < channels; ++i) {
            scratch[i] = key[i * channel_stride];
        }
        return scratch;
    }
};

// The size of a key's code as the contract counts it: NaN as 0, infinities as the largest number.
inline int32_t counted(uint16_t code) {
    const int32_t size = code & 0x7FFF;
    const int32_t finite = size > 0x7BFF ? 0x7BFF : size;
    return size > 0x7C00 ? 0 : finite;
}

// X. A normal number's exponent moves by 24 and from a bias of 15 to one of 127.
inline float fixed_point(uint16_t code) {
    const int32_t size = counted(code);
    const float normal = float_of_bits((size << 13) + (136 << 23));
    const float value = size < 0x400 ? float(size) : normal;
    return code & 0x8000 ? -value : value;
}

inline void add_keys(const uint16_t* __restrict key, int channels, double* __restrict sums,
                     int32_t* __restrict largest) {
    for (int i = 0; i < channels; ++i) {
        sums[i] += double(fixed_point(key[i]));
        const int32_t size = counted(key[i]);
        largest[i] = size > largest[i] ? size : largest[i];
    }
}

inline void add_deviations(const uint16_t* __restrict key, int channels,
                           const double* __restrict means, double* __restrict sums) {
    for (int i = 0; i < channels; ++i) {
        sums[i] += __builtin_fabs(double(fixed_point(key[i])) - means[i]);
    }
}

// rne(sum / count).
inline int64_t divide_half_even(int64_t sum, int64_t count) {
    const int64_t quotient = floor_divide(sum, count);
    const int64_t twice_rest = 2 * (sum - quotient * count);
    const bool up = twice_rest > count || (twice_rest == count && (quotient & 1));
    return quotient + (up ? 1 : 0);
}

// rne(value * 2^-shift).
inline int64_t shift_half_even(int64_t value, int shift) {
    return shift <= 0 ? value * (int64_t(1) << -shift)
                      : divide_half_even(value, int64_t(1) << shift);
}

inline int bit_length(int64_t value) {
    return value ? 64 - __builtin_clzll(uint64_t(value)) : 0;
}

// c and M of one KV head's channels, at most kStatisticsChannels of them, over at least one token.
void take_statistics(const uint16_t* keys, int64_t token_stride, int64_t channel_stride,
                     int64_t tokens, int channels, int8_t* exponents, int32_t* means) {
    const KeyRows rows{keys, token_stride, channel_stride, channels};
    alignas(64) uint16_t scratch[kStatisticsChannels];
    alignas(64) double sums[kStatisticsChannels];
    alignas(64) double averages[kStatisticsChannels];
    alignas(64) int32_t largest[kStatisticsChannels] = {};
    int64_t totals[kStatisticsChannels] = {};
    for (int64_t start = 0; start < tokens; start += kExactTokens) {
        const int64_t stop = start + kExactTokens < tokens ? start + kExactTokens : tokens;
        std::memset(sums, 0, sizeof sums);
        for (int64_t token = start; token < stop; ++token) {
            add_keys(rows.row(token, scratch), channels, sums, largest);
        }
        for (int i = 0; i < channels; ++i) {
            totals[i] += int64_t(sums[i]);
        }
    }
    int64_t mean[kStatisticsChannels];
    int64_t deviations[kStatisticsChannels] = {};
    for (int i = 0; i < channels; ++i) {
        mean[i] = divide_half_even(totals[i], tokens);
        averages[i] = double(mean[i]);
    }
    for (int64_t start = 0; start < tokens; start += kExactTokens) {
        const int64_t stop = start + kExactTokens < tokens ? start + kExactTokens : tokens;
        std::memset(sums, 0, sizeof sums);
        for (int64_t token = start; token < stop; ++token) {
            add_deviations(rows.row(token, scratch), channels, averages, sums);
        }
        for (int i = 0; i < channels; ++i) {
            deviations[i] += int64_t(sums[i]);
        }
    }
    for (int i = 0; i < channels; ++i) {
        const int spread = bit_length(deviations[i] / tokens) - 21;
        const int range = bit_length(int64_t(fixed_point(uint16_t(largest[i])))) - 33;
        const int32_t exponent = clamp_int(spread > range ? spread : range, -14, 16);
        const int64_t value = shift_half_even(mean[i], exponent + 10);
        const int64_t low = value < -kProductMax ? -kProductMax : value;
        exponents[i] = int8_t(exponent);
        means[i] = int32_t(low > kProductMax ? kProductMax : low);
    }
}

}  // namespace
