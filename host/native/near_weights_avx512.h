// SPDX-License-Identifier: Apache-2.0
// Near weights of a KV head with AVX-512: exponents and sums stay in registers for all heads.
#pragma once
#include <immintrin.h>

#include "near_scores.h"

namespace {

struct NearWeightsAvx512 {
    static constexpr int kParts = 4;  // A group's tokens in vectors.

    // As `NearWeights` has it.
    static void some_values(const int32_t* products, const int32_t* exponents, NearRow row,
                            uint64_t tokens, int32_t* out) {
        const __m512i shift = _mm512_set1_epi32(row.shift());
        const __m512i bias = _mm512_set1_epi32(row.bias());
        const __m512i most = _mm512_set1_epi32(row.most());
        const __m512i rounding = _mm512_set1_epi32(row.rounding());
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const __mmask16 own = __mmask16(tokens >> (16 * part));
            const int count = __builtin_popcount(own);
            const __m512i moved = _mm512_sub_epi32(
                _mm512_sllv_epi32(_mm512_loadu_si512(products + 16 * part), shift), bias);
            // A shift by more than 31 leaves the sign, as one by 31 does.
            const __m512i twice = _mm512_srav_epi32(
                moved, _mm512_sub_epi32(most, _mm512_loadu_si512(exponents + 16 * part)));
            const __m512i values = _mm512_srai_epi32(_mm512_add_epi32(twice, rounding), 1);
            // Packed in a register, as to pack into memory is slow on some processors.
            _mm512_mask_storeu_epi32(out, __mmask16((1u << count) - 1),
                                     _mm512_maskz_compress_epi32(own, values));
            out += count;
        }
    }

    // As `NearWeights`.
    static bool add_near_weights(const uint8_t* stored, const int32_t* products,
                                 const NearRow* rows, int count, int32_t limit, int32_t* sums,
                                 int32_t* valid) {
        int32_t most = 255;
        for (int i = 0; i < count; ++i) {
            most = rows[i].most() < most ? rows[i].most() : most;
        }
        const __m512i all = _mm512_loadu_si512(stored);
        const __mmask64 good =
            _mm512_cmpneq_epi8_mask(all, _mm512_set1_epi8(int8_t(hillinfer::kInvalidExponent)));
        if (most < 0 ||
            _mm512_mask_cmpgt_epu8_mask(good, all, _mm512_set1_epi8(int8_t(most)))) {
            return false;
        }
        if (~good) {
            mark_invalid(stored, valid);
        }
        const __m512i even = _mm512_set1_epi32(-2);
        // Twice what `weight` adds to Z, and twice its lowest Z with it.
        constexpr int32_t kAdded = 2 * ((24 + 127) << 8);
        const __m512i lowest = _mm512_set1_epi32(kAdded - 2 * 26 * 256);
        __m512i largest = lowest;
        __m512i less[kParts];
        __m512i own[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const __m512i exponents = _mm512_maskz_cvtepu8_epi32(
                __mmask16(good >> (16 * part)),
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored + 16 * part)));
            less[part] = _mm512_sub_epi32(_mm512_setzero_si512(), exponents);
            own[part] = _mm512_loadu_si512(sums + 16 * part);
        }
        for (int i = 0; i < count; ++i, products += hillinfer::kGroupTokens) {
            const __m512i shift = _mm512_set1_epi32(rows[i].shift());
            const __m512i bias = _mm512_set1_epi32(rows[i].bias());
            const __m512i right = _mm512_set1_epi32(rows[i].most());
            const __m512i added = _mm512_set1_epi32(rows[i].rounding() + kAdded);
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                const __m512i moved = _mm512_sub_epi32(
                    _mm512_sllv_epi32(_mm512_loadu_si512(products + 16 * part), shift), bias);
                // A shift by more than 31 leaves the sign, as one by 31 does.
                const __m512i twice =
                    _mm512_srav_epi32(moved, _mm512_add_epi32(less[part], right));
                // Twice Z: half of it would be moved right and then left again.
                const __m512i z = _mm512_max_epi32(
                    _mm512_and_si512(_mm512_add_epi32(twice, added), even), lowest);
                largest = _mm512_max_epi32(largest, z);
                // A Z from `limit` on makes some number here, but then nobody looks at the sums.
                own[part] = _mm512_add_epi32(
                    own[part], _mm512_cvttps_epi32(_mm512_castsi512_ps(_mm512_slli_epi32(z, 14))));
            }
        }
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            _mm512_storeu_si512(sums + 16 * part, own[part]);
        }
        return !_mm512_cmpge_epi32_mask(largest, _mm512_set1_epi32(kAdded + 2 * limit));
    }
};

}  // namespace
