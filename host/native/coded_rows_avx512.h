// SPDX-License-Identifier: Apache-2.0
// Inner products and weighted sums of a block's rows with AVX-512: a lane adds what the contract has it
// add, and sums stay in registers.
#pragma once
#include <immintrin.h>

#include "coded_plain_rows.h"

namespace {

// As `PlainRows`; of at most four heads.
struct RowsAvx512 {
    static void products(int32_t stored_type, const uint64_t* rows, int tokens, size_t start, int dim,
                         const float (*query)[hillinfer::kMostCodedChannels], int heads,
                         float (*out)[kBlockTokens]) {
        const auto run = stored_type == hillinfer::kFloat16 ? products_of<true>(heads)
                                                            : products_of<false>(heads);
        run(rows, tokens, start, dim, query, out);
    }

    static void weighted(int32_t stored_type, const uint64_t* rows, int tokens, size_t start, int dim,
                         const float (*weights)[kBlockTokens], int heads,
                         float (*out)[hillinfer::kMostCodedChannels]) {
        const bool halves = stored_type == hillinfer::kFloat16;
        const auto whole = halves ? weighted_of<true, 4>(heads) : weighted_of<false, 4>(heads);
        const auto some = halves ? weighted_of<true, 1>(heads) : weighted_of<false, 1>(heads);
        int first = 0;
        for (; first + 4 * kLanes <= dim; first += 4 * kLanes) {
            whole(rows, tokens, start, first, dim, weights, out);
        }
        for (; first < dim; first += kLanes) {
            some(rows, tokens, start, first, dim, weights, out);
        }
    }

private:
    static constexpr int kLanes = 16;
    // Rows whose products are made together.
    static constexpr int kOnce = 4;

    using Products = void (*)(const uint64_t*, int, size_t, int,
                              const float (*)[hillinfer::kMostCodedChannels], float (*)[kBlockTokens]);
    using Weighted = void (*)(const uint64_t*, int, size_t, int, int, const float (*)[kBlockTokens],
                              float (*)[hillinfer::kMostCodedChannels]);

    template <bool kHalves>
    static Products products_of(int heads) {
        switch (heads) {
            case 1:
                return products_of_heads<kHalves, 1>;
            case 2:
                return products_of_heads<kHalves, 2>;
            case 3:
                return products_of_heads<kHalves, 3>;
            default:
                return products_of_heads<kHalves, 4>;
        }
    }

    template <bool kHalves, int kVectors>
    static Weighted weighted_of(int heads) {
        switch (heads) {
            case 1:
                return weighted_of_heads<kHalves, kVectors, 1>;
            case 2:
                return weighted_of_heads<kHalves, kVectors, 2>;
            case 3:
                return weighted_of_heads<kHalves, kVectors, 3>;
            default:
                return weighted_of_heads<kHalves, kVectors, 4>;
        }
    }

    // Items of a row from `first` on, 0 behind the last one.
    template <bool kHalves>
    static __m512 items(uint64_t row, size_t start, int first, __mmask16 here) {
        const __m256i own = _mm256_maskz_loadu_epi16(here, at(row) + start + 2 * size_t(first));
        return kHalves ? _mm512_cvtph_ps(own)
                       : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(own), 16));
    }

    static __mmask16 up_to(int left) { return left >= kLanes ? 0xFFFF : __mmask16((1u << left) - 1); }

    template <bool kHalves, int kHeads>
    static void products_of_heads(const uint64_t* rows, int tokens, size_t start, int dim,
                                  const float (*query)[hillinfer::kMostCodedChannels],
                                  float (*out)[kBlockTokens]) {
        for (int row = 0; row < tokens; row += kOnce) {
            uint64_t own[kOnce];
#pragma GCC unroll 4
            for (int i = 0; i < kOnce; ++i) {
                // The last row stands in for those that lack.
                own[i] = rows[row + i < tokens ? row + i : tokens - 1];
                const int ahead = row + i + kOnce + kRowsAhead;
                fetch_bytes(at(rows[ahead < tokens ? ahead : tokens - 1]) + start, dim * 2);
            }
            __m512 sums[kHeads][kOnce];
#pragma GCC unroll 4
            for (auto& head : sums) {
#pragma GCC unroll 4
                for (__m512& sum : head) {
                    sum = _mm512_setzero_ps();
                }
            }
            for (int first = 0; first < dim; first += kLanes) {
                const __mmask16 here = up_to(dim - first);
                __m512 keys[kOnce];
#pragma GCC unroll 4
                for (int i = 0; i < kOnce; ++i) {
                    keys[i] = items<kHalves>(own[i], start, first, here);
                }
#pragma GCC unroll 4
                for (int head = 0; head < kHeads; ++head) {
                    const __m512 numbers = _mm512_loadu_ps(query[head] + first);
#pragma GCC unroll 4
                    for (int i = 0; i < kOnce; ++i) {
                        sums[head][i] = _mm512_fmadd_ps(numbers, keys[i], sums[head][i]);
                    }
                }
            }
            // Lanes of 128 bits are rows, and in each of them first a head's four sums, then two of two
            // heads, then one of each head.
            __m512 of[4];
#pragma GCC unroll 4
            for (int head = 0; head < 4; ++head) {
                of[head] = head < kHeads ? by_rows(sums[head]) : of[0];
            }
            const __m512 all = halved<0x88, 0xDD>(halved<0x44, 0xEE>(of[0], of[1]),
                                                  halved<0x44, 0xEE>(of[2], of[3]));
            const __m512 by_heads = _mm512_permutexvar_ps(
                _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
            _mm_storeu_ps(out[0] + row, _mm512_castps512_ps128(by_heads));
            if constexpr (kHeads > 1) {
                _mm_storeu_ps(out[1] + row, _mm512_extractf32x4_ps(by_heads, 1));
            }
            if constexpr (kHeads > 2) {
                _mm_storeu_ps(out[2] + row, _mm512_extractf32x4_ps(by_heads, 2));
            }
            if constexpr (kHeads > 3) {
                _mm_storeu_ps(out[3] + row, _mm512_extractf32x4_ps(by_heads, 3));
            }
        }
    }

    // Lane l + 8 is added to lane l, then l + 4.
    static __m512 by_rows(const __m512* rows) {
        const __m512 first = crossed<0x44, 0xEE>(rows[0], rows[1]);
        const __m512 second = crossed<0x44, 0xEE>(rows[2], rows[3]);
        return crossed<0x88, 0xDD>(first, second);
    }

    template <int kLow, int kHigh>
    static __m512 crossed(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, kLow), _mm512_shuffle_f32x4(a, b, kHigh));
    }

    template <int kLow, int kHigh>
    static __m512 halved(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, kLow), _mm512_shuffle_ps(a, b, kHigh));
    }

    template <bool kHalves, int kVectors, int kHeads>
    static void weighted_of_heads(const uint64_t* rows, int tokens, size_t start, int first, int dim,
                                  const float (*weights)[kBlockTokens],
                                  float (*out)[hillinfer::kMostCodedChannels]) {
        const __mmask16 here = up_to(dim - first - (kVectors - 1) * kLanes);
        __m512 sums[kHeads][kVectors];
#pragma GCC unroll 4
        for (auto& head : sums) {
#pragma GCC unroll 4
            for (__m512& sum : head) {
                sum = _mm512_setzero_ps();
            }
        }
        for (int token = 0; token < tokens; ++token) {
            const int ahead = token + kRowsAhead < tokens ? token + kRowsAhead : tokens - 1;
            fetch_bytes(at(rows[ahead]) + start + 2 * size_t(first), kVectors * kLanes * 2);
            __m512 values[kVectors];
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                values[i] = items<kHalves>(rows[token], start, first + i * kLanes,
                                           i + 1 < kVectors ? __mmask16(0xFFFF) : here);
            }
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const __m512 weight = _mm512_set1_ps(weights[head][token]);
#pragma GCC unroll 4
                for (int i = 0; i < kVectors; ++i) {
                    sums[head][i] = _mm512_fmadd_ps(weight, values[i], sums[head][i]);
                }
            }
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                _mm512_storeu_ps(out[head] + first + i * kLanes, sums[head][i]);
            }
        }
    }
};

}  // namespace
