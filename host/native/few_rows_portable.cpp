// SPDX-License-Identifier: Apache-2.0
// Products of few rows in plain C++, for any machine.
#include "few_rows_kernels.h"

namespace {

struct Portable {
    static constexpr int kLanes = 4;
    static constexpr int kSums = 12;
    typedef float Float __attribute__((vector_size(4 * kLanes)));
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

    static Float zero() { return Float{}; }

    static Float load(const float* from) {
        Float values;
        std::memcpy(&values, from, sizeof values);
        return values;
    }

    static Float load(const uint16_t* from) {
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        return Float(__builtin_convertvector(halves, Words) << 16);
    }

    // Rounded twice: the bits are not those of the other variants.
    static Float fma(Float a, Float b, Float c) { return a * b + c; }
    static float sum(Float values) { return (values[0] + values[2]) + (values[1] + values[3]); }
};

}  // namespace

namespace hillinfer {

void few_rows_portable(const FewRows& given, int64_t first, int64_t stop) {
    all_rows<Portable>(given, first, stop);
}

}  // namespace hillinfer
