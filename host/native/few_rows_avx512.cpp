// SPDX-License-Identifier: Apache-2.0
// Products of few rows with AVX-512.
#include <immintrin.h>

#include "few_rows_kernels.h"

namespace {

struct Avx512 {
    using Float = __m512;
    static constexpr int kLanes = 16;
    static constexpr int kSums = 24;

    static Float zero() { return _mm512_setzero_ps(); }
    static Float load(const float* from) { return _mm512_loadu_ps(from); }
    static Float load(const uint16_t* from) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }

    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Float values) { return _mm512_reduce_add_ps(values); }
};

}  // namespace

namespace hillinfer {

void few_rows_avx512(const FewRows& given, int64_t first, int64_t stop) {
    all_rows<Avx512>(given, first, stop);
}

}  // namespace hillinfer
