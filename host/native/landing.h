// SPDX-License-Identifier: Apache-2.0
// Rows of a file brought to their places in memory: planned, read, copied out and looked at.
#pragma once
#include <atomic>
#include <cstdint>

#include "api.h"
#include "attending.h"
#include "file_reads.h"
#include "page_cipher.h"

namespace hillinfer {

// Shared with Python: the order and types of these fields are part of the C interface.
struct Landing {
    const int64_t* rows;    // Their numbers, each once.
    const int64_t* places;  // Which row of `out` each becomes.
    int64_t count;
    int64_t row_bytes;
    uint8_t* out;
    int64_t out_rows;
    uint8_t* buffer;  // What reads go through; null where rows are read to their places.
    int64_t buffer_bytes;
    const uint32_t* sums;  // Checksums of rows, by their numbers; null where nobody looks.
    int64_t sum_count;
    // Where in the file each group of 64 rows begins; null where row r lies at r * row_bytes.
    const int64_t* starts;
    int64_t start_count;
    // Where the next call goes on: rows in the order of the file that are there, and whether somebody
    // else has read what was missing of the batch behind them.
    int64_t landed;
    int64_t is_read;
    // What was done so far.
    int64_t reads;
    int64_t byte_count;
    int64_t wrong;  // The first of the rows that are not as they were written; below 0 where none is.
    // Reads of the batch at `landed` that did not come whole: there is room for a batch's.
    int64_t missing;
    int64_t* missing_offsets;
    uint64_t* missing_addresses;
    int64_t* missing_counts;
    // Who attends to the rows as they come, and which of its addresses each of them is; null where nobody
    // does. It is done when all of its rows are here.
    Attending* attending;
    const int64_t* numbers;
    // What opens the pages that rows lie in: one for all of the file, or where `seals_groups` is set
    // one for each group of 64 rows. Null where they are plain.
    const PageSeal* seals;
    int64_t seal_count;
    int64_t seals_groups;
    // Reads through the buffer begin and end at multiples of it; at least a page where pages are sealed.
    int64_t unit_bytes;
};

// Lands rows, batch after batch, until all are there or reads of a batch did not come whole. These are
// `missing`; once they were read otherwise and `is_read` is set, the next call goes on. kMisplaced where
// a row, a page or a place is nowhere; kLost where a ring did not give its reads back. Where `gives_way`
// is given and set it ends behind a batch, and the next call goes on.
Outcome land(const ReadWay& way, Landing& landing, const std::atomic<bool>* gives_way = nullptr);

}  // namespace hillinfer
