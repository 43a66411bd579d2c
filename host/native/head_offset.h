// SPDX-License-Identifier: Apache-2.0
// The offset B of one head (scoring contract, section 6).
#pragma once
#include "contract.h"

namespace {

// `once` tokens count once, those behind them `stride` times.
int32_t log_sum(const int32_t* __restrict log_weights, const uint8_t* __restrict invalid,
                int64_t count, int64_t once, int64_t stride) {
    int32_t top = kLeftOut;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t own = invalid[i] ? kLeftOut : log_weights[i];
        top = own > top ? own : top;
    }
    if (top == kLeftOut) {
        return 0;
    }
    uint64_t totals[2] = {};
    for (int part = 0; part < 2; ++part) {
        uint64_t total = 0;
        for (int64_t i = part ? once : 0; i < (part ? count : once); ++i) {
            const int32_t own = invalid[i] ? kLeftOut : log_weights[i];
            // Z <= 0, so w is at most 2^24 and fits an int32.
            total += uint64_t(int32_t(weight(own - top)));
        }
        totals[part] = total;
    }
    const uint64_t total = totals[0] + totals[1] * uint64_t(stride);
    const int length = 64 - __builtin_clzll(total);
    return top + ((length - 25) << 8) + (int32_t(total >> (length - 9)) & 255);
}

}  // namespace
