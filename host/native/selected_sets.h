// SPDX-License-Identifier: Apache-2.0
// Selected sets, and the rows that at least one of them has: what is counted as hit, found, brought
// and promoted is a row, whichever KV heads attend to it.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"

namespace hillinfer {

// Shared with Python: the order and types of these fields are part of the C interface.
struct SelectedSets {
    int64_t set_count;    // They share out the KV heads evenly, in order.
    int64_t set_rows;     // Positions of each set.
    int64_t* sets;        // They, set after set, ascending in each.
    int64_t* positions;   // Of all rows, ascending; `sets` itself where there is one set.
    int32_t* numbers;     // Which of the rows each of `sets` is; null where there is one set.
    uint64_t* addresses;  // Where the rows lie, 0 for one that is not in memory.
    int64_t count;        // Rows.
};

// Says which rows the sets have; positions are from 0 to `length` - 1.
void join_sets(SelectedSets& selected, int64_t length);

// Addresses of the sets' rows, all here; `memory` holds them where they do not lie in order.
std::vector<RowSet> rows_of_sets(const SelectedSets& selected, std::vector<uint64_t>& memory);

// What sets have of the rows from `start` to `stop` - 1.
std::vector<ComingSet> coming_sets(const SelectedSets& selected, int64_t start, int64_t stop);

}  // namespace hillinfer
