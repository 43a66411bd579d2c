// SPDX-License-Identifier: Apache-2.0
// One decode step of one layer: a new token's row is stored, its key coded, tokens are chosen and
// attended to. What is known of a sequence and a pool lies in tables that are kept between calls.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "awaited.h"
#include "halves.h"
#include "kernels.h"
#include "row_places.h"
#include "selected_sets.h"
#include "tables.h"

namespace hillinfer {

// Shared with Python: the order and types of these fields are part of the C interface.
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
    int64_t exact;       // How many of them are exact, where the others are coded.
    int64_t kept_bytes;  // Of products that may be kept from choosing to weighing by the same query.
    int32_t step;        // For stamps of slots.
    int32_t fade_shift;  // Of hits, 0 where none fade; below 0 nothing is counted.
    // Of a float32 query that is not turned to its position yet: head_dim of each, which the library
    // turns it by as transformers would; else null.
    const float* cosines;
    const float* sines;
    // When the parts were done, nanoseconds of the steady clock, written by the calls.
    int64_t coded_at;
    int64_t chosen_at;
};

// Stores the row of the token at position `length`, whose group it does not open: keys and values of
// each KV head, of the stored type already or float32 that becomes FP16. Returns how many finite
// numbers did not fit and became the largest that do.
int64_t store_token(LayerTable& table, const Shape& shape, int32_t number_type,
                    const void* keys, int64_t key_stride, const void* values,
                    int64_t value_stride);

// Codes the keys in the tail that are not coded yet, all of the last segment, and chooses sets of
// `step.count` positions, one behind the other, a coming token the last of each. Where `exact` is given
// it gets the best `step.exact` of each, and `products` as of `score_sequence`. False where the query is
// not finite.
bool choose_tokens(const Kernels& kernels, LayerTable& table, DecodeStep& step, int64_t* sets,
                   int64_t* exact = nullptr, int32_t* products = nullptr);

// Chooses for the newest token, which is stored, as `choose_tokens` did before it was: by a predicted
// query among the others, with the newest the last of each set.
bool choose_before(const Kernels& kernels, LayerTable& table, DecodeStep& ahead, int64_t* sets,
                   int64_t* exact = nullptr);

// Counts positions as hits and lets those of before fade.
void tally(const LayerTable& table, const DecodeStep& step, const int64_t* positions,
           int64_t count);

// Finds rows, writes their addresses, 0 for a cold one, and stamps those that are hot; `ahead` of a
// token that is coming none is stamped, and a group that the newest token filled has left the tail.
Found find_selected(const LayerTable& table, const PoolTable& pool, const DecodeStep& step,
                    const int64_t* positions, int64_t count, bool ahead, uint64_t* addresses);

// Rows of a selection that are not in memory, and what was read ahead. Shared with Python, as above.
struct Misses {
    // What was read ahead: positions, ascending, and which rows from `landed` on they are.
    const int64_t* landed_positions;
    const int64_t* landed_places;
    int64_t landed_count;
    uint64_t landed;
    // Of each miss, those that were read ahead first: which of the selection it is, the number of its
    // row, its place there, position and hits.
    int64_t* numbers;
    int64_t* rows;
    int64_t* places;
    int32_t* positions;
    uint16_t* hits;
    int64_t arrived;
    int64_t count;
    // Who brings what was read ahead and is to be waited for before anybody looks; null where it is here.
    Awaited* coming;
};

// Lists the rows without an address; those that were read ahead get theirs.
void list_misses(const LayerTable& table, const int64_t* positions, int64_t count,
                 uint64_t* addresses, Misses& misses);

// What attention computes for a step; the query's memory is `memory` where it was widened.
Attention attention_of(const DecodeStep& step, std::vector<float>& memory);

// Attends to sets whose rows are all here; `out` gets query heads * head_dim.
void attend_selected(const AttentionKernels& kernels, const DecodeStep& step,
                     const SelectedSets& selected, float* out);

// Lists nothing yet, and waits for what was read ahead; false where not all of it came as it was written.
bool have_arrived(Misses& misses);

// Counts the rows of joined sets as hits, finds them and, where all of them are in memory, attends to
// them; lists what is missing.
Found attend_joined(int32_t variant, const LayerTable& table, const PoolTable& pool,
                    const DecodeStep& step, SelectedSets& selected, Misses& misses, float* out);

// What Python is told of it.
int32_t outcome_of(Found found);

// A choice that another thread makes.
struct ChoiceAhead;

// Waits for it and forgets it, where there is one; kNotFinite where the query was not. Whoever is
// interrupted behind it sees that it is gone.
int32_t end_choice(ChoiceAhead*& ahead);

}  // namespace hillinfer
