// SPDX-License-Identifier: Apache-2.0
// One layer's step over exact rows and coded tokens, from its query to the output (scoring contract,
// sections 14 to 16).
#pragma once
#include <cstdint>
#include <vector>

#include "coded_slots.h"
#include "decode_step.h"
#include "landing.h"
#include "selected_sets.h"
#include "tables.h"

namespace hillinfer {

// A segment's values: the number of codes of them, and their statistics. Shared with Python: the order
// and types of these fields, and those below, are part of the C interface.
struct SegmentValues {
    int64_t number;
    const int8_t* exponents;
    const int32_t* means;
};

// No codes are known under it: a row that is read itself.
constexpr int64_t kNoNumber = -2;

// Codes of tokens on their way from a file, record after record. Shared with Python, as below.
struct ComingCodes {
    Awaited* awaited;
    const int64_t* rows;     // Whose they are, in the order of positions,
    const int64_t* numbers;  // and numbers of their segments' values.
    int64_t count;
    const uint8_t* records;
    int64_t record_bytes;
    int64_t taken;  // Written: how many of the tokens without codes have them here, all or none.
};

// Selected sets, what of them is exact and what is coded, and where that lies. Rows and tokens are those
// that at least one set has.
struct SplitSelection {
    int64_t set_rows;  // Positions of each set,
    int64_t* sets;     // set after set, ascending in each.
    SelectedSets* exact;
    SelectedSets* coded;  // Addresses are those of codes.
    const SegmentValues* segments;
    int64_t segment_count;
    // L' of each set's coded tokens and whether their keys are invalid, query or KV heads * tokens, where
    // shadows do not lie in the tables; else null.
    const int32_t* const* aligned;
    const uint8_t* const* invalid;
    uint8_t* arrived;  // Memory for codes of tokens that have none: as many as are coded.
    int64_t row_bytes;  // Of one token's.
    // Written by `find_split`. Of the coded tokens: how many are in full groups, the number behind their
    // rows' largest, these numbers, and which have no codes.
    int64_t settled_count;
    int64_t rows_end;
    int64_t* rows;
    int64_t* missing;
    int64_t missing_count;
    int64_t read_count;  // Those of them whose rows are read, ahead or now.
    // Of the missing ones, numbers of their segments' values, and where their rows lie, 0 where these
    // are to be read.
    int64_t* numbers;
    uint64_t* sources;
    // Rows that are to be read: of a choice that is made ahead, exact ones and those of tokens without
    // codes, and numbers of these tokens' values; of one that is attended to, the latter alone, and which of
    // the missing ones they are.
    int64_t* cold_positions;
    int64_t* cold_rows;
    int64_t* cold_numbers;
    int64_t cold_count;
    ComingCodes* coming;  // Null where none are on their way.
};

// What of a split is to be read now. Shared with Python, as above.
struct SplitLanding {
    const ReadWay* way;  // Of the rows' file, with the calling thread's ring; null where none is read.
    Landing* exact;      // Exact rows, null where none is missing,
    const int64_t* numbers;  // and which of the exact ones they are.
    Landing* coded;          // Rows of all tokens that are to be read, which are coded; null where none is.
    ComingCodes* codes;      // Codes on their way, null where none are,
    const int64_t* filed;    // and which of the tokens without codes have them, one after the other.
    // Written, by the clock that Python's `perf_counter_ns` reads: when the call began, when exact rows
    // and when rows of other tokens were there, and when all was.
    int64_t begun_ns;
    int64_t exact_ns;
    int64_t coded_ns;
    int64_t came_ns;
};

// Tells the coded tokens of each set; false where an exact one is not selected.
bool split_sets(SplitSelection& split, int64_t length);

// Lists what of a choice that is made ahead is to be read: positions below `held` whose rows are not
// hot, exact ones and those of coded tokens without codes; false where one has no row.
bool list_cold(const LayerTable& table, const PoolTable& pool, const CodeSlots& slots,
               int32_t segment_tokens, int64_t held, SplitSelection& split);

// Says where codes lie, and where rows of tokens that have none, which may have been read ahead. False
// where a coded token has no row, or no segment.
bool find_split(const LayerTable& table, const PoolTable& pool, const CodeSlots& slots,
                int32_t segment_tokens, const Misses& landed, SplitSelection& split);

// Waits for codes on their way where they are those of all tokens that are to be read, and says where they
// lie. False, and these are still to be read, where they are not, or did not come as they were written.
bool take_coming(SplitSelection& split);

}  // namespace hillinfer
