// SPDX-License-Identifier: Apache-2.0
// Attention with AVX2, FMA and F16C.
#include <immintrin.h>

#include "attention_kernels.h"
#include "prompt_attention_kernels.h"

namespace {

struct Avx2 {
    using Float = __m256;
    static constexpr int kLanes = 8;
    static constexpr int kHeadsAtOnce = 3;
    static constexpr int kVectorsAtOnce = 2;

    static Float all(float value) { return _mm256_set1_ps(value); }
    static Float load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Float values) { _mm256_storeu_ps(to, values); }
    static float first(Float values) { return _mm256_cvtss_f32(values); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    // The second where one is NaN.
    static Float largest(Float a, Float b) { return _mm256_max_ps(a, b); }

    // The low bits of `shifted` are the power.
    static Float times_power(Float values, Float shifted) {
        const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(values), power));
    }

    static Float zero_below(Float values, Float x, Float least) {
        return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), values);
    }

    // A block's vectors: even and odd items of BF16, which then need one instruction each, the
    // first and the last half of FP16.
    template <StoredType kType, int kHalf>
    static Float widen(const uint16_t* block) {
        if constexpr (kType == hillinfer::kFloat16) {
            const auto* half = reinterpret_cast<const __m128i*>(block + kHalf * kLanes);
            return _mm256_cvtph_ps(_mm_loadu_si128(half));
        }
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
        if constexpr (kHalf == 0) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        }
        // From memory: a register for the mask is one sum less in registers.
        alignas(32) static constexpr int32_t kMask[8] = {-65536, -65536, -65536, -65536,
                                                         -65536, -65536, -65536, -65536};
        __m256i odd;
        asm("vpand %2, %1, %0" : "=x"(odd) : "x"(pairs), "m"(kMask));
        return _mm256_castsi256_ps(odd);
    }

    static void four_sums(const Float* of, float* to) {
        const Float pairs = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]),
                                           _mm256_hadd_ps(of[2], of[3]));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs),
                                     _mm256_extractf128_ps(pairs, 1)));
    }

    static float sum(Float values) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
    }

    static float largest_of(Float values) {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
    }
};

}  // namespace

namespace hillinfer {
const AttentionKernels kAvx2Attention = attention_kernels_of<Avx2>(prompt_kernels_of<Avx2>());
}
