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
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Float values) { return _mm512_reduce_add_ps(values); }
};

}  // namespace

namespace hillinfer {

void few_rows_avx512(const FewRows& given, int64_t first, int64_t stop) {
    FewRowsProducts<Avx512>::all_rows(given, first, stop);
}

}  // namespace hillinfer
