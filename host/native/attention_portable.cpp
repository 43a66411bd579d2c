// SPDX-License-Identifier: Apache-2.0
// Attention in plain C++, for any machine.
#include "attention_kernels.h"
#include "prompt_attention_kernels.h"

namespace {

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Portable {
    static constexpr int kLanes = 4;
    static constexpr int kHeadsAtOnce = 3;
    static constexpr int kVectorsAtOnce = 2;
    // Compilers know these and have vectors of this size on nearly any machine.
    typedef float Float __attribute__((vector_size(4 * kLanes)));
    typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

    static Float all(float value) { return Float{value, value, value, value}; }

    static Float load(const float* from) {
        Float values;
        std::memcpy(&values, from, sizeof values);
        return values;
    }

    static void store(float* to, Float values) { std::memcpy(to, &values, sizeof values); }
    static float first(Float values) { return values[0]; }
    // Rounded twice: the bits are not those of the other variants.
    static Float fma(Float a, Float b, Float c) { return a * b + c; }
    // The second where one is NaN.
    static Float largest(Float a, Float b) { return chosen(Bits(a > b), a, b); }

    // The low bits of `shifted` are the power.
    static Float times_power(Float values, Float shifted) {
        return Float(Bits(values) + (Bits(shifted) << 23));
    }

    static Float zero_below(Float values, Float x, Float least) {
        return Float(Bits(values) & ~Bits(x < least));
    }

    // A block's vectors: even and odd items of BF16, the first and the last half of FP16.
    template <StoredType kType, int kHalf>
    static Float widen(const uint16_t* block) {
        if constexpr (kType == hillinfer::kBfloat16) {
            const uint16_t* own = block + kHalf;
            const Bits bits = {own[0], own[2], own[4], own[6]};
            return Float(bits << 16);
        }
        const uint16_t* own = block + kHalf * kLanes;
        const Bits bits = {own[0], own[1], own[2], own[3]};
        const Bits magnitude = (bits & 0x7FFF) << 13;
        // The exponent's bias grows by 112, also where the number is subnormal.
        const Float finite = Float(magnitude) * all(float_of((112 + 127) << 23));
        const Bits not_finite = Bits(magnitude >= (0x7C00u << 13));
        const Bits wide = (Bits(finite) & ~not_finite) | ((magnitude | 0x7F800000u) & not_finite);
        return Float(wide | (bits & 0x8000) << 16);
    }

    static void four_sums(const Float* of, float* to) {
        for (int i = 0; i < 4; ++i) {
            to[i] = sum(of[i]);
        }
    }

    static float sum(Float values) { return (values[0] + values[1]) + (values[2] + values[3]); }

    static float largest_of(Float values) {
        float most = values[0];
        for (int i = 1; i < kLanes; ++i) {
            most = values[i] > most ? values[i] : most;
        }
        return most;
    }

private:
    static Float chosen(Bits where, Float a, Float b) {
        return Float((Bits(a) & where) | (Bits(b) & ~where));
    }
};

}  // namespace

namespace hillinfer {
const AttentionKernels kPortableAttention = attention_kernels_of<Portable>(prompt_kernels_of<Portable>());
}
