// SPDX-License-Identifier: Apache-2.0
// Attention with one softmax over rows and coded tokens, the same bits everywhere (scoring contract,
// section 16).
#pragma once
#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "shape.h"

namespace hillinfer {

constexpr int kBlockTokens = 64;
constexpr int kMostCodedChannels = 256;
// KV heads that one thread attends for at once.
constexpr int kMostBlockHeads = 64;
// Weights are cut below 2^-40 of a block's largest power of two, and blocks of the largest block's.
constexpr int kLeastPower = -40;

// Shared with Python: the order and types of these fields are part of the C interface.
struct CodedAttention {
    const float* query;  // q' (section 4), query_heads * head_dim.
    int32_t kv_heads;
    int32_t group_size;
    int32_t head_dim;
    int32_t stored_type;
    int32_t first_head;  // Of the KV heads that this call attends for,
    int32_t head_count;  // and how many they are.
    int32_t threads;

    int query_heads() const { return kv_heads * group_size; }
    // Bytes of a token's value codes in one KV head.
    int code_bytes() const { return value_dim(head_dim) / 2; }
    HeadRange heads() const { return {first_head, head_count}; }
};

// Coded tokens of one segment, in ascending positions. Shared with Python likewise.
struct CodedTokens {
    const int32_t* aligned;       // L' (section 5), [query_heads][stride].
    const uint8_t* invalid_keys;  // [kv_heads][stride], or null where every key is valid.
    const uint64_t* code_rows;    // Addresses,
    const uint64_t* exponents;    // and those of the first KV head's exponents; the next head's
    int64_t exponent_stride;      // lies so many bytes further.
    const int8_t* channel_exponents;  // c, kv_heads * head_dim.
    const int32_t* means;             // M, likewise.
    int64_t stride;
    int64_t tokens;
};

// Softmax over blocks, each relative to a power of two: [block][query_heads].
struct BlockPartials {
    int32_t* powers;  // R.
    int64_t* totals;  // W, in units of 2^-40.
    float* outputs;   // O, head_dim of each.
    uint8_t* broken;  // Whether a token has no weight that could be told.

    BlockPartials from(size_t head, size_t head_dim) const {
        return {powers + head, totals + head, outputs + head * head_dim, broken + head};
    }
};

// What one softmax is computed in, for all query heads.
struct CodedWork {
    int32_t* fixed;         // X of exact tokens, [query_heads][count].
    BlockPartials sums;     // R', W' and the sum of outputs so far, kMostCodedChannels of each.
    float* means;           // Of a segment, kMostCodedChannels of each KV head,
    float* units;           // likewise.
};

// What each instruction set provides.
struct CodedKernels {
    // Attends for some KV heads, and writes their part of the output, query_heads * head_dim.
    void (*attend)(const CodedAttention&, HeadRange, const uint64_t* rows, int64_t count,
                   const CodedTokens* segments, int64_t segment_count, const CodedWork&, float* out);
    void (*exact_blocks)(const CodedAttention&, const uint64_t* rows, int64_t count,
                         const CodedWork&, const BlockPartials& out);
    void (*coded_blocks)(const CodedAttention&, const CodedTokens&, const CodedWork&,
                         const BlockPartials& out);
    void (*merge)(const CodedAttention&, const BlockPartials& blocks, int64_t count, float* out);
};

extern const CodedKernels kPortableCoded;
#if defined(__x86_64__)
extern const CodedKernels kAvx2Coded;
extern const CodedKernels kAvx512Coded;
#elif defined(__aarch64__)
extern const CodedKernels kNeonCoded;
#endif

// Attends to rows and coded tokens at once, some KV heads on each thread; `out` gets the outputs of the
// heads that are attended for, at their places. The variant is one that the processor runs.
void attend_coded(int32_t variant, const CodedAttention& call, const uint64_t* rows, int64_t count,
                  const CodedTokens* segments, int64_t segment_count, float* out);

// 2^23 * 2^(i/256), rounded: what weights' 24 bits are made of.
extern const int32_t kPowers[257];

}  // namespace hillinfer
