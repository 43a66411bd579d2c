// SPDX-License-Identifier: Apache-2.0
// The slots of a hot pool, and which rows take the place of which.
#pragma once
#include <cstdint>

#include "tables.h"

namespace hillinfer {

// What a row is worth to the pool policies that are known here; others rank rows themselves. Numbers
// are part of the interface; Python has the same.
enum Worth : int32_t { kRankedByCaller = -1, kHits = 0, kLastSelected = 1, kPinnedHits = 2, kNewest = 3 };

// Shared with Python: the order and types of these fields are part of the C interface.
struct Promotion {
    // Candidates, each once, and where their bytes lie.
    const int64_t* rows;
    const int32_t* positions;
    const uint16_t* counts;
    const uint8_t* source;
    const int64_t* places;
    int64_t source_rows;
    int64_t count;
    // Keys of candidates and of all used slots: the larger, the sooner a row stays hot. Null where
    // `worth` says how rows rank.
    const int64_t* keys;
    const int64_t* slot_keys;
    // The moment.
    int32_t worth;
    int32_t step;
    int32_t length;
    int32_t settled_before;  // Rows selected in this step or later stay.
    int64_t kept_sinks;
    int64_t kept_recent;
    double alpha;
    // What was done.
    int64_t promoted;
    int64_t demoted;
};

// Promotes candidates that are not hot yet into free slots, and in place of rows that rank below them.
// False where a candidate's row or place is nowhere.
bool promote(const PoolTable& slots, Promotion& promotion);

// Demotes all but the best `capacity` rows and gives their memory back; says how many they were. Of
// the promotion its moment and keys of slots are looked at.
int64_t shrink(SlotPool& pool, int64_t capacity, const Promotion& promotion);

}  // namespace hillinfer
