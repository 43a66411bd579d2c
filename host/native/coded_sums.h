// SPDX-License-Identifier: Apache-2.0
// Where a block's sums of codes lie, what they are multiplied by, and what they are added to.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_weights.h"

namespace {

using hillinfer::CodedAttention;
using hillinfer::kMostCodedChannels;

// Up to this U no power of two that a sum is multiplied by leaves a float's range, whatever the order.
constexpr int kMostTop = 101;

// Of each query head h and place i, sums[h][i] grows by
// fma(totals[h], means[i], sum of codes) * units[i] * factors[h]. Only fma and the addition round, for
// units and factors are powers of two, or 0.
template <int kHeads>
struct AddedSums {
    const float* means;
    const float* units;
    float totals[kHeads];
    float factors[kHeads];
    float* sums[kHeads];
};

// Where sums of codes have each channel. Four channels from a multiple of four on stay together.
template <class V>
struct CodedPlaces {
    int dim;
    int width;
    int32_t of[kMostCodedChannels];

    explicit CodedPlaces(const CodedAttention& call)
        : dim(call.head_dim), width(V::width(call.code_bytes() / 16)) {
        for (int i = 0; i < dim; ++i) {
            of[i] = V::place(i, call.code_bytes() / 16);
        }
    }

    int operator[](int channel) const { return of[channel]; }

    // From channels' order to places, which have room for kMostCodedChannels.
    void put(const float* from, float* to) const {
        int i = 0;
        for (; i + 4 <= dim; i += 4) {
            std::memcpy(to + of[i], from + i, 4 * sizeof *to);
        }
        for (; i < dim; ++i) {
            to[of[i]] = from[i];
        }
    }

    void take(const float* from, float* to) const {
        int i = 0;
        for (; i + 4 <= dim; i += 4) {
            std::memcpy(to + i, from + of[i], 4 * sizeof *to);
        }
        for (; i < dim; ++i) {
            to[i] = from[of[i]];
        }
    }
};

}  // namespace
