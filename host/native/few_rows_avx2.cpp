// SPDX-License-Identifier: Apache-2.0
// Products of few rows with AVX2 and FMA.
#include <immintrin.h>

#include "few_rows_kernels.h"

namespace {

struct Avx2 {
    using Float = __m256;
    static constexpr int kLanes = 8;
    static constexpr int kSums = 12;

    static Float zero() { return _mm256_setzero_ps(); }
    static Float load(const float* from) { return _mm256_loadu_ps(from); }
    static Float load(const uint16_t* from) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }

    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

    static float sum(Float values) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
    }
};

}  // namespace

namespace hillinfer {

void few_rows_avx2(const FewRows& given, int64_t first, int64_t stop) {
    all_rows<Avx2>(given, first, stop);
}

}  // namespace hillinfer
