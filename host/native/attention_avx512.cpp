// SPDX-License-Identifier: Apache-2.0
// Attention with AVX-512.
#include <immintrin.h>

#include "attention_kernels.h"
#include "prompt_attention_kernels.h"

namespace {

struct Avx512 {
    using Float = __m512;
    static constexpr int kLanes = 16;
    static constexpr int kHeadsAtOnce = 4;
    static constexpr int kVectorsAtOnce = 4;

    static Float all(float value) { return _mm512_set1_ps(value); }
    static Float load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Float values) { _mm512_storeu_ps(to, values); }
    static float first(Float values) { return _mm_cvtss_f32(_mm512_castps512_ps128(values)); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    // The second where one is NaN.
    static Float largest(Float a, Float b) { return _mm512_max_ps(a, b); }

    // The low bits of `shifted` are the power.
    static Float times_power(Float values, Float shifted) {
        const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(values), power));
    }

    static Float zero_below(Float values, Float x, Float least) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), values);
    }

    // A block's vectors: even and odd items of BF16, which then need one instruction each, the
    // first and the last half of FP16.
    template <StoredType kType, int kHalf>
    static Float widen(const uint16_t* block) {
        if constexpr (kType == hillinfer::kFloat16) {
            const auto* half = reinterpret_cast<const __m256i*>(block + kHalf * kLanes);
            return _mm512_cvtph_ps(_mm256_loadu_si256(half));
        }
        const __m512i pairs = _mm512_loadu_si512(block);
        return _mm512_castsi512_ps(kHalf ? _mm512_and_si512(pairs, _mm512_set1_epi32(-65536))
                                         : _mm512_slli_epi32(pairs, 16));
    }

    static void four_sums(const Float* of, float* to) {
        const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halves(of[0]), halves(of[1])),
                                            _mm256_hadd_ps(halves(of[2]), halves(of[3])));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs),
                                     _mm256_extractf128_ps(pairs, 1)));
    }

    static float sum(Float values) {
        const __m256 both = halves(values);
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
    }

    static float largest_of(Float values) { return _mm512_reduce_max_ps(values); }

private:
    static __m256 halves(Float values) {
        return _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
    }
};

}  // namespace

namespace hillinfer {
const AttentionKernels kAvx512Attention = attention_kernels_of<Avx512>(prompt_kernels_of<Avx512>());
}
