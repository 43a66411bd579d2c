// SPDX-License-Identifier: Apache-2.0
// Value codes of a layer's tokens that stay in DRAM: where they lie, and which give way to others.
#pragma once
#include <cstdint>

namespace hillinfer {

constexpr int64_t kChunkSlots = 64;

// By row number. Shared with Python, whose arrays these are: the order and types of these fields are
// part of the C interface.
struct CodeSlots {
    int32_t* slot_of_row;  // Below 0 where nothing is kept.
    uint16_t* worth;       // How often and how lately a row was wanted, FP16.
    int64_t row_count;
    int32_t* numbers;  // Of each slot, that of its segment's values,
    int32_t* rows;     // and its row, below 0 where it is free.
    int64_t slot_count;
    const uint64_t* chunks;  // Addresses of 64 slots each.
    int64_t row_bytes;
    float step_worth;  // What it is worth to be wanted now,
    float most_worth;  // and the most that many wants are.
};

// Where a row's codes lie that were made under a number, 0 where they are not kept.
uint64_t find_code(const CodeSlots& slots, int64_t row, int64_t number);

// Notes that rows, each once, are wanted now; of those that there are no tables for nothing is noted.
void want_codes(const CodeSlots& slots, const int64_t* rows, int64_t count);

// Keeps codes of rows, each once, that are worth more than what gives way for them, and returns how
// many. Those are left out that there are no tables for.
int64_t offer_codes(const CodeSlots& slots, const int64_t* rows, const int64_t* numbers,
                    const uint64_t* codes, int64_t count);

}  // namespace hillinfer
