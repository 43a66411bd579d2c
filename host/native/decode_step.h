// SPDX-License-Identifier: Apache-2.0
// One decode step of one layer: a new token's row is stored, its key coded, tokens are chosen and
// attended to. What is known of a sequence and a pool lies in tables that are kept between calls.
#pragma once
#include <cstdint>

#include "attention.h"
#include "kernels.h"
#include "row_places.h"

namespace hillinfer {

enum NumberType : int32_t { kFloat32Numbers = 0, kBfloat16Numbers = 1, kFloat16Numbers = 2 };

// The block table of one sequence in one layer, with its hit counts and the descriptors of its
// shadow. Shared with Python, which updates what changes: the order and types of these fields, and
// of those below, are part of the C interface.
struct LayerTable {
    const int64_t* groups;
    int64_t group_count;
    uint8_t* tail;  // Rows from `held` on.
    int64_t row_bytes;
    int64_t length;
    int64_t held;
    uint16_t* hits;
    int64_t hit_count;
    Segment* segments;  // All that are coded; the last one may be open.
    int64_t segment_count;
};

// The slots of a layer's hot pool.
struct PoolTable {
    const int32_t* slot_of_row;
    int64_t row_count;
    int32_t* stamps;
    uint64_t slots;
};

struct DecodeStep {
    Shape shape;
    const void* query;    // Query heads * head_dim, as the model made it.
    int64_t head_stride;  // From one head to the next, in numbers.
    int32_t query_type;
    int32_t group_size;
    int32_t stored_type;
    int32_t coming;  // Tokens that are counted and have no key yet.
    float factor;    // As in `Choice`, and
    float scaling;   // of attention.
    int32_t sinks;
    int32_t threads;
    int64_t recent;
    int64_t count;
    int32_t step;        // For stamps of slots.
    int32_t fade_shift;  // Of hits, 0 where none fade; below 0 nothing is counted.
    // When the parts were done, nanoseconds of the steady clock, written by the calls.
    int64_t coded_at;
    int64_t chosen_at;
};

// Stores the row of the token at position `length`, whose group it does not open: keys and values of
// each KV head, of the stored type already or float32 that becomes FP16. Returns how many finite
// numbers did not fit and became the largest that do.
int64_t store_token(const LayerTable& table, const Shape& shape, int32_t number_type,
                    const void* keys, int64_t key_stride, const void* values,
                    int64_t value_stride);

// Codes the keys in the tail that are not coded yet, all of the last segment, and chooses
// `step.count` positions, a coming token the last of them. False where the query is not finite.
bool choose_tokens(const Kernels& kernels, const LayerTable& table, DecodeStep& step,
                   int64_t* positions);

// Counts positions as hits and lets those of before fade.
void tally(const LayerTable& table, const DecodeStep& step, const int64_t* positions,
           int64_t count);

// Finds rows, writes their addresses, 0 for a cold one, and stamps those that are hot; `ahead` of a
// token that is coming none is stamped, and a group that the newest token filled has left the tail.
Found find_selected(const LayerTable& table, const PoolTable& pool, const DecodeStep& step,
                    const int64_t* positions, int64_t count, bool ahead, uint64_t* addresses);

// Attends to rows that are all here; `out` gets query heads * head_dim.
void attend_selected(const AttentionKernels& kernels, const DecodeStep& step,
                     const uint64_t* addresses, int64_t count, float* out);

}  // namespace hillinfer
