// SPDX-License-Identifier: Apache-2.0
// Products of few rows and many, for the vectors of one instruction set.
//
// `V` has the type Float with kLanes lanes, kSums of them that stay in registers, and arithmetic. It
// loads float and uint16_t, which stands for bfloat16.
// Everything has internal linkage, as in attention_kernels.h.
#pragma once
#include <algorithm>
#include <cstring>

#include "few_rows.h"
#include "halves.h"

namespace {

using hillinfer::FewRows;

// A weight that is loaded is used for so many rows at once.
constexpr int kRowsAtOnce = 8;
constexpr int kMostOutputs = 4;
// A processor's second one: the outputs that are worked on fill the first.
constexpr int kFarCache = 2;

inline float number(float of) { return of; }

inline float number(uint16_t of) {
    const uint32_t bits = uint32_t(of) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline void put(float value, float* out) { *out = value; }

inline void put(float value, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    *out = hillinfer::bfloat16_of(bits);
}

template <class V, class Number>
struct FewRowsProducts {
    using Float = typename V::Float;
    static constexpr int kLanes = V::kLanes;
    static constexpr int64_t kLineNumbers = 64 / sizeof(Number);

    // Each row's sums are of its own numbers in one order, whichever rows and outputs are beside it:
    // what a row gets does not depend on how many there are.
    template <int kRows, int kOutputs>
    static void tile(const FewRows& given, const Number* rows, int64_t output, Number* out) {
        const Number* const weights = static_cast<const Number*>(given.weights) + output * given.inputs;
        const Number* const bias = static_cast<const Number*>(given.bias);
        Float sums[kRows][kOutputs];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kOutputs; ++own) {
                sums[row][own] = V::zero();
            }
        }
        const auto add = [&](auto load) {
            Float loaded[kOutputs];
#pragma GCC unroll 4
            for (int own = 0; own < kOutputs; ++own) {
                loaded[own] = load(weights + own * given.inputs);
            }
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const Float own_row = load(rows + row * given.row_stride);
#pragma GCC unroll 4
                for (int own = 0; own < kOutputs; ++own) {
                    sums[row][own] = V::fma(own_row, loaded[own], sums[row][own]);
                }
            }
        };
        int64_t i = 0;
        for (; i + kLanes <= given.inputs; i += kLanes) {
            // What the next outputs take: the processor does not follow so many rows by itself.
            if (i % kLineNumbers == 0) {
                for (int own = kOutputs; own < 2 * kOutputs; ++own) {
                    __builtin_prefetch(weights + own * given.inputs + i, 0, kFarCache);
                }
            }
            add([i](const Number* from) { return V::load(from + i); });
        }
        if (i < given.inputs) {
            add([i, count = size_t(given.inputs - i)](const Number* from) {
                Number some[kLanes] = {};
                std::memcpy(some, from + i, count * sizeof *some);
                return V::load(some);
            });
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kOutputs; ++own) {
                const float sum = V::sum(sums[row][own]);
                put(bias ? sum + number(bias[output + own]) : sum,
                    out + row * given.outputs + output + own);
            }
        }
    }

    template <int kRows>
    static void some_rows(const FewRows& given, int64_t row, int64_t first, int64_t stop) {
        constexpr int kOutputs = std::clamp(V::kSums / kRows, 1, kMostOutputs);
        const Number* const rows = static_cast<const Number*>(given.rows) + row * given.row_stride;
        Number* const out = static_cast<Number*>(given.out) + row * given.outputs;
        for (; first + kOutputs <= stop; first += kOutputs) {
            tile<kRows, kOutputs>(given, rows, first, out);
        }
        for (; first < stop; ++first) {
            tile<kRows, 1>(given, rows, first, out);
        }
    }

    static void all_rows(const FewRows& given, int64_t first, int64_t stop) {
        for (int64_t row = 0; row < given.row_count; row += kRowsAtOnce) {
            switch (std::min<int64_t>(given.row_count - row, kRowsAtOnce)) {
                case 1: some_rows<1>(given, row, first, stop); break;
                case 2: some_rows<2>(given, row, first, stop); break;
                case 3: some_rows<3>(given, row, first, stop); break;
                case 4: some_rows<4>(given, row, first, stop); break;
                case 5: some_rows<5>(given, row, first, stop); break;
                case 6: some_rows<6>(given, row, first, stop); break;
                case 7: some_rows<7>(given, row, first, stop); break;
                default: some_rows<8>(given, row, first, stop); break;
            }
        }
    }
};

template <class V>
void all_rows(const FewRows& given, int64_t first, int64_t stop) {
    if (given.number_type == hillinfer::kBfloat16Numbers) {
        FewRowsProducts<V, uint16_t>::all_rows(given, first, stop);
    } else {
        FewRowsProducts<V, float>::all_rows(given, first, stop);
    }
}

}  // namespace
