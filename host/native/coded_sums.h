// SPDX-License-Identifier: Apache-2.0
// What a block's sums of codes are multiplied by, and what they are added to.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_weights.h"

namespace {

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

}  // namespace
