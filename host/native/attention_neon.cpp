// SPDX-License-Identifier: Apache-2.0
// Attention with NEON.
#include <arm_neon.h>

#include "attention_kernels.h"
#include "prompt_attention_kernels.h"

namespace {

struct Neon {
    using Float = float32x4_t;
    static constexpr int kLanes = 4;
    static constexpr int kHeadsAtOnce = 3;
    static constexpr int kVectorsAtOnce = 4;

    static Float all(float value) { return vdupq_n_f32(value); }
    static Float load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Float values) { vst1q_f32(to, values); }
    static float first(Float values) { return vgetq_lane_f32(values, 0); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    // The second where one is NaN.
    static Float largest(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

    // The low bits of `shifted` are the power.
    static Float times_power(Float values, Float shifted) {
        const int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
        return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(values), power));
    }

    static Float zero_below(Float values, Float x, Float least) {
        return vreinterpretq_f32_u32(
            vbicq_u32(vreinterpretq_u32_f32(values), vcltq_f32(x, least)));
    }

    // A block's vectors: even and odd items of BF16, which then need one instruction each, the
    // first and the last half of FP16.
    template <StoredType kType, int kHalf>
    static Float widen(const uint16_t* block) {
        if constexpr (kType == hillinfer::kFloat16) {
            return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(block + kHalf * kLanes)));
        }
        const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(block));
        return vreinterpretq_f32_u32(kHalf ? vandq_u32(pairs, vdupq_n_u32(0xFFFF0000u))
                                           : vshlq_n_u32(pairs, 16));
    }

    static void four_sums(const Float* of, float* to) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(of[0], of[1]), vpaddq_f32(of[2], of[3])));
    }

    static float sum(Float values) { return vaddvq_f32(values); }
    static float largest_of(Float values) { return vmaxvq_f32(values); }
};

}  // namespace

namespace hillinfer {
const AttentionKernels kNeonAttention = attention_kernels_of<Neon>(prompt_kernels_of<Neon>());
}
