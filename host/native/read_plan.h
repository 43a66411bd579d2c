// SPDX-License-Identifier: Apache-2.0
// Turns scattered rows of a file into few aligned reads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hillinfer {

// A row that is wanted: its number, where it lies in the file, and which of those wanted it is.
struct WantedRow {
    int64_t row;
    int64_t offset;
    int64_t index;
};

// Rows that one stretch of the file holds, from the first to behind the last of the sorted ones.
struct Run {
    int64_t first;
    int64_t stop;
    int64_t file_offset;
    int64_t byte_count;
    uint64_t address;  // Where its bytes go.
};

// Reads that are made together, and the runs that they bring; `run_of_read` says which.
struct ReadPlan {
    std::vector<Run> runs;
    std::vector<int64_t> file_offsets, byte_counts, run_of_read;
    std::vector<uint64_t> addresses;

    void cut();
};

// Where a row lies in its file. `starts` says where each group of rows begins; where it is null, row r
// lies at r * row_bytes.
int64_t row_offset(int64_t row, int64_t row_bytes, const int64_t* starts);

// The rows in the order of the file; each comes once.
std::vector<WantedRow> in_file_order(const int64_t* rows, int64_t count, int64_t row_bytes,
                                     const int64_t* starts);

// Plans a batch that begins with the row `first` of the sorted ones: whole units, joined over small
// gaps, one behind the other in a buffer, as many rows as fit and one at least. Returns where the next
// batch begins.
int64_t plan_batch(const std::vector<WantedRow>& sorted, int64_t first, int64_t row_bytes,
                   int64_t unit_bytes, uint8_t* buffer, int64_t buffer_bytes, ReadPlan& plan);

// Plans reads of all rows, of whole pages each, to their places; neighbours in file and memory are
// read together.
void plan_in_place(const std::vector<WantedRow>& sorted, int64_t first, int64_t stop, const int64_t* places, int64_t row_bytes,
                   uint8_t* out, ReadPlan& plan);

}  // namespace hillinfer
