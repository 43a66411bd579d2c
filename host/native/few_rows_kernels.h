// SPDX-License-Identifier: Apache-2.0
// Products of few rows and many, for the vectors of one instruction set.
//
// `V` has the type Float with kLanes lanes, kSums of them that stay in registers, and arithmetic.
// Everything has internal linkage, as in attention_kernels.h.
#pragma once
#include <algorithm>
#include <cstring>

#include "few_rows.h"

namespace {

using hillinfer::FewRows;

// A weight that is loaded is used for so many rows at once.
constexpr int kRowsAtOnce = 8;
constexpr int kMostOutputs = 4;

template <class V>
struct FewRowsProducts {
    using Float = typename V::Float;
    static constexpr int kLanes = V::kLanes;

    // Each row's sums are of its own numbers in one order, whichever rows and outputs are beside it:
    // what a row gets does not depend on how many there are.
    template <int kRows, int kOutputs>
    static void tile(const FewRows& given, const float* rows, int64_t output, float* out) {
        const float* const weights = given.weights + output * given.inputs;
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
                const Float number = load(rows + row * given.row_stride);
#pragma GCC unroll 4
                for (int own = 0; own < kOutputs; ++own) {
                    sums[row][own] = V::fma(number, loaded[own], sums[row][own]);
                }
            }
        };
        int64_t i = 0;
        for (; i + kLanes <= given.inputs; i += kLanes) {
            add([i](const float* from) { return V::load(from + i); });
        }
        if (i < given.inputs) {
            add([i, count = size_t(given.inputs - i)](const float* from) {
                float some[kLanes] = {};
                std::memcpy(some, from + i, count * sizeof *some);
                return V::load(some);
            });
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kOutputs; ++own) {
                const float sum = V::sum(sums[row][own]);
                out[row * given.outputs + output + own] =
                    given.bias ? sum + given.bias[output + own] : sum;
            }
        }
    }

    template <int kRows>
    static void some_rows(const FewRows& given, int64_t row, int64_t first, int64_t stop) {
        constexpr int kOutputs = std::clamp(V::kSums / kRows, 1, kMostOutputs);
        const float* const rows = given.rows + row * given.row_stride;
        float* const out = given.out + row * given.outputs;
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

}  // namespace
