// SPDX-License-Identifier: Apache-2.0
// Inner products and weighted sums of a block's rows, with what compilers make of loops.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_rows.h"

namespace {

constexpr int kProductLanes = 16;
// What of a row is asked for early, as there is nothing to compute on before.
constexpr int kRowsAhead = 12;

// Queries and outputs have room for kMostCodedChannels, zeros behind the query's last one; products and
// weights for kBlockTokens. `start` is where a row's keys or values begin. `V` has `widen`.
template <class V>
struct PlainRows {
    // x of at most 64 rows, in the contract's order of sums.
    static void products(int32_t stored_type, const uint64_t* rows, int tokens, size_t start, int dim,
                         const float (*query)[hillinfer::kMostCodedChannels], int heads,
                         float (*out)[kBlockTokens]) {
        const int padded = (dim + kProductLanes - 1) / kProductLanes * kProductLanes;
        alignas(64) float key[hillinfer::kMostCodedChannels] = {};
        for (int row = 0; row < tokens; ++row) {
            if (row + kRowsAhead < tokens) {
                fetch_bytes(at(rows[row + kRowsAhead]) + start, dim * 2);
            }
            V::widen(stored_type, at(rows[row]) + start, dim, key);
            for (int head = 0; head < heads; ++head) {
                out[head][row] = product(query[head], key, padded);
            }
        }
    }

    // O of at most 64 rows, ascending, from 0.
    static void weighted(int32_t stored_type, const uint64_t* rows, int tokens, size_t start, int dim,
                         const float (*weights)[kBlockTokens], int heads,
                         float (*out)[hillinfer::kMostCodedChannels]) {
        alignas(64) float value[hillinfer::kMostCodedChannels];
        for (int head = 0; head < heads; ++head) {
            for (int i = 0; i < dim; ++i) {
                out[head][i] = 0.0f;
            }
        }
        for (int token = 0; token < tokens; ++token) {
            if (token + kRowsAhead < tokens) {
                fetch_bytes(at(rows[token + kRowsAhead]) + start, dim * 2);
            }
            V::widen(stored_type, at(rows[token]) + start, dim, value);
            for (int head = 0; head < heads; ++head) {
                const float weight = weights[head][token];
                float* __restrict const own = out[head];
                for (int i = 0; i < dim; ++i) {
                    own[i] = __builtin_fmaf(weight, value[i], own[i]);
                }
            }
        }
    }

private:
    static float product(const float* __restrict query, const float* __restrict key, int padded) {
        alignas(64) float lanes[kProductLanes] = {};
        for (int j = 0; j < padded; j += kProductLanes) {
            for (int l = 0; l < kProductLanes; ++l) {
                lanes[l] = __builtin_fmaf(query[j + l], key[j + l], lanes[l]);
            }
        }
        for (int half = kProductLanes / 2; half; half /= 2) {
            for (int l = 0; l < half; ++l) {
                lanes[l] += lanes[l + half];
            }
        }
        return lanes[0];
    }
};

}  // namespace
