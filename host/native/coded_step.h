// SPDX-License-Identifier: Apache-2.0
// One layer's step over exact rows and coded tokens, from its selected set to the output (scoring
// contract, sections 14 to 16).
#pragma once
#include <cstdint>

#include "decode_step.h"
#include "tables.h"

namespace hillinfer {

// Codes of a layer's tokens by row number. Shared with Python, whose arrays these are.
struct CodeSlots {
    const int32_t* slot_of_row;  // Below 0 where nothing is kept.
    int64_t row_count;
    const int32_t* numbers;  // Of each slot, that of its segment's values.
    const uint64_t* chunks;  // Addresses of 64 slots each.
    int64_t row_bytes;
};

// A segment's values: the number of codes of them, and their statistics. Shared with Python.
struct SegmentValues {
    int64_t number;
    const int8_t* exponents;
    const int32_t* means;
};

// A selected set, and what of it is coded. Shared with Python, likewise.
struct CodedSelection {
    const int64_t* selected;  // Positions, ascending.
    int64_t selected_count;
    const int64_t* exact;  // Those of them that are exact.
    int64_t exact_count;
    const SegmentValues* segments;
    int64_t segment_count;
    // Written by `find_codes`, as many as are selected.
    int64_t* coded;     // The other positions,
    int64_t* rows;      // the numbers of their rows as far as they are in full groups,
    uint64_t* codes;    // and where their codes lie, 0 where they are not kept.
    int64_t* missing;   // Which of the coded ones in full groups have none.
    int64_t coded_count;
    int64_t settled_count;  // Coded tokens in full groups.
    int64_t missing_count;
    // Memory for codes of those that are missing, and of those in the tail behind them.
    uint8_t* arrived;
};

// Says what is coded of a selection and where its codes lie. Positions from `held` on are in the tail,
// or come there; false where one has no segment, row, or is exact and not selected.
bool find_codes(const LayerTable& table, const CodeSlots& slots, int32_t segment_tokens, int64_t held,
                CodedSelection& selection);

}  // namespace hillinfer
