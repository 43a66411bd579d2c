// SPDX-License-Identifier: Apache-2.0
// Scores a whole sequence in one pass over its shadows (scoring contract, sections 3 and 4).
#pragma once
#include "kernels.h"

namespace hillinfer {

// Everything a call needs; Python fills it in.
struct Sequence {
    Shape shape;
    const float* scaled;  // rows * head_dim, from `scale_query`.
    const Segment* segments;
    int64_t segment_count;
    int32_t threads;
};

// Tuples of all N tokens, sets * N.
void score_sequence(const Kernels& kernels, const Sequence& sequence, uint32_t* tuples);

// L' and exponents of one segment whose shadow is here for now: per group rows * 64 of the one and
// kv_heads * 64 of the other.
void segment_log_weights(const Kernels& kernels, const Sequence& sequence, const Segment& segment,
                         int32_t* log_weights, uint8_t* exponents);

// The tuples from those of all groups of a sequence; every segment but the last one is full.
void finish_sequence(const Kernels& kernels, const Sequence& sequence, int64_t tokens,
                     const int32_t* log_weights, const uint8_t* exponents, uint32_t* tuples);


}  // namespace hillinfer
