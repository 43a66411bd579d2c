// SPDX-License-Identifier: Apache-2.0
// Where the rows of selected positions lie: in a hot pool's slots, in the open group, or on the
// drive alone.
#pragma once
#include <cstdint>

#include "tables.h"

namespace hillinfer {

struct Places {
    const int64_t* positions;
    int64_t count;
    int64_t settled;  // Positions below are in full groups and may be hot.
    int64_t held;     // Those from here to `length` lie behind `tail`.
    int64_t length;
    uint64_t tail;
    const int64_t* groups;
    int64_t group_count;
    const int32_t* slot_of_row;
    int64_t row_count;
    int32_t* stamps;  // None are written where it is null.
    uint64_t slots;
    int64_t row_bytes;
    int32_t step;
};

// Where the rows of a sequence's layer may lie; slots are stamped with a step that is not below 0.
Places places_of(const LayerTable& table, const PoolTable& pool, const int64_t* positions,
                 int64_t count, int32_t step);

// What was found: kNowhere where a position is behind the last token or in no group.
enum Found : int32_t { kAllHot, kSomeCold, kNowhere };

// Writes the address of each position's row to `out`, 0 where it is on the drive alone, and stamps
// the slots of hot ones with the step.
Found find_rows(const Places& places, uint64_t* out);

// Copies rows to `out`, one behind the other; a row that lies at its own place there stays.
void copy_rows(const uint64_t* rows, int64_t count, int64_t row_bytes, uint8_t* out);

}  // namespace hillinfer
