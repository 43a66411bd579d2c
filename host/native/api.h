// SPDX-License-Identifier: Apache-2.0
// Shared by all functions of the C interface: the export macro, outcomes, a guard against exceptions.
#pragma once
#include <cstdint>
#include <new>

#include "exact_floats.h"

#define HILLINFER_API extern "C" __attribute__((visibility("default")))

namespace hillinfer {

// Numbers are part of the interface; Python has the same.
enum Variant : int32_t { kPortableVariant = 0, kAvx2Variant = 1, kAvx512Variant = 2, kNeonVariant = 3 };

enum Outcome : int32_t {
    kDone = 0,
    kNoSuchVariant = 1,
    kNoMemory = 2,
    kFailed = 3,
    kNotFinite = 4,
    kCold = 5,
    kMisplaced = 6,
    kLost = 7,
};

struct Kernels;
struct AttentionKernels;

// Of a variant, or null where the processor cannot run it.
const Kernels* scoring_kernels(int32_t variant);
const AttentionKernels* attention_kernels(int32_t variant);

// No exception leaves the library: the caller is not C++. What it computes is the same whatever its
// thread does with subnormal numbers.
template <class Call>
int32_t guarded(Call call) {
    const ExactFloats exact;
    try {
        call();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    } catch (...) {
        return kFailed;
    }
    return kDone;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_has_variant(int32_t variant);
