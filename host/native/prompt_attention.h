// SPDX-License-Identifier: Apache-2.0
// Exact softmax attention of a prompt's many queries to a block of rows.
//
// Keys and values are packed once for all queries. Then threads share tiles of queries: scores of a
// tile and some keys, the softmax is continued by them, and values are added up. What a query gets
// depends on its block alone: not on threads, nor on the queries beside it.
#pragma once
#include <cstdint>

namespace hillinfer {

// Of keys and values; the first two are StoredType's.
enum ItemType : int32_t { kBfloat16Items = 0, kFloat16Items = 1, kFloat32Items = 2 };

// Shared with Python. Strides are counted in items; each head of a row is without gaps.
struct PromptBlock {
    const float* query;
    int64_t query_head_stride;
    int64_t query_stride;
    const void* keys;
    int64_t key_head_stride;
    int64_t key_stride;
    const void* values;
    int64_t value_head_stride;
    int64_t value_stride;
    // What earlier blocks gave, and what they and this one give: the output, and the logarithm of
    // its softmax's denominator, -inf where there was no block.
    float* out;
    int64_t out_head_stride;
    int64_t out_stride;
    float* log_sums;
    int64_t log_sum_stride;  // From one head's to the next.
    int64_t queries;
    int64_t tokens;
    int32_t kv_heads;
    int32_t group_size;
    int32_t head_dim;
    int32_t item_type;
    // Whether the queries are of the block's own tokens, and see none behind their own.
    int32_t is_causal;
    float scaling;
    int32_t threads;
};

// Keys that continue a softmax together.
constexpr int64_t kPromptKeys = 256;
// Queries of a tile: with their scores in the first cache, beside a panel of keys.
constexpr int64_t kPromptQueries = 24;

// What each instruction set provides.
struct PromptKernels {
    // Floats that a KV head's kPromptKeys packed keys and values take.
    int64_t (*packed_floats)(int32_t head_dim);
    // Packs a KV head's keys and values from number `first` on, kPromptKeys of them or what is left.
    void (*pack)(const PromptBlock& block, int kv_head, int64_t first, float* packed);
    // Attends of kPromptQueries of a query head from `first` on, or what is left. `packed` has all
    // of its KV head.
    void (*attend)(const PromptBlock& block, int query_head, int64_t first, const float* packed);
};

struct AttentionKernels;
void attend_block(const AttentionKernels& kernels, const PromptBlock& block);

}  // namespace hillinfer
