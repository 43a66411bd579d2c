// SPDX-License-Identifier: Apache-2.0
#include "read_plan.h"

#include <algorithm>

#include "shape.h"

namespace hillinfer {
namespace {

// A random read costs about as much as streaming a few pages, so reading through a small gap is
// cheaper than a second read. Gaps of 4 to 16 KiB measure alike; larger ones waste bandwidth. Python
// has the same two numbers.
constexpr int64_t kJoinGapBytes = 8 * 1024;
constexpr int64_t kMaxReadBytes = 256 * 1024;

}  // namespace

int64_t row_offset(int64_t row, int64_t row_bytes, const int64_t* starts) {
    return starts ? starts[row / kGroupTokens] + row % kGroupTokens * row_bytes : row * row_bytes;
}

std::vector<WantedRow> in_file_order(const int64_t* rows, int64_t count, int64_t row_bytes,
                                     const int64_t* starts) {
    std::vector<WantedRow> sorted;
    sorted.reserve(size_t(count));
    bool rising = true;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows[i];
        const int64_t offset = row_offset(row, row_bytes, starts);
        rising &= i == 0 || sorted.back().offset < offset;
        sorted.push_back({row, offset, i});
    }
    // What a selection wants mostly comes in order.
    if (!rising) {
        std::sort(sorted.begin(), sorted.end(), [](const WantedRow& one, const WantedRow& other) {
            return one.offset < other.offset;
        });
    }
    return sorted;
}

int64_t plan_batch(const std::vector<WantedRow>& sorted, int64_t first, int64_t row_bytes,
                   int64_t unit_bytes, uint8_t* buffer, int64_t buffer_bytes, ReadPlan& plan) {
    int64_t used = 0, end = 0, next = first;
    plan.runs.clear();
    for (; next < int64_t(sorted.size()); ++next) {
        const int64_t begin = sorted[next].offset;
        const int64_t own_start = begin / unit_bytes * unit_bytes;
        const int64_t own_end = (begin + row_bytes + unit_bytes - 1) / unit_bytes * unit_bytes;
        const bool is_new = next == first || own_start > end + kJoinGapBytes;
        const int64_t grown = own_end - (is_new ? own_start : end);
        if (next > first && used + grown > buffer_bytes) {
            break;
        }
        if (is_new) {
            plan.runs.push_back({next, next, own_start, 0, reinterpret_cast<uint64_t>(buffer) + used});
        }
        plan.runs.back().stop = next + 1;
        plan.runs.back().byte_count += grown;
        used += grown;
        end = own_end;
    }
    plan.cut();
    return next;
}

void plan_in_place(const std::vector<WantedRow>& sorted, int64_t first, int64_t stop,
                   const int64_t* places, int64_t row_bytes, uint8_t* out, ReadPlan& plan) {
    plan.runs.clear();
    for (int64_t next = first; next < stop; ++next) {
        const int64_t place = places[sorted[next].index];
        const bool is_new = next == first || sorted[next].offset != sorted[next - 1].offset + row_bytes ||
                            place != places[sorted[next - 1].index] + 1;
        if (is_new) {
            plan.runs.push_back({next, next, sorted[next].offset, 0,
                                 reinterpret_cast<uint64_t>(out) + place * row_bytes});
        }
        plan.runs.back().stop = next + 1;
        plan.runs.back().byte_count += row_bytes;
    }
    plan.cut();
}

// Makes the reads of the runs; long ones are cut.
void ReadPlan::cut() {
    file_offsets.clear();
    byte_counts.clear();
    addresses.clear();
    run_of_read.clear();
    for (size_t run = 0; run < runs.size(); ++run) {
        for (int64_t done = 0; done < runs[run].byte_count; done += kMaxReadBytes) {
            file_offsets.push_back(runs[run].file_offset + done);
            addresses.push_back(runs[run].address + uint64_t(done));
            byte_counts.push_back(std::min(kMaxReadBytes, runs[run].byte_count - done));
            run_of_read.push_back(int64_t(run));
        }
    }
}

}  // namespace hillinfer
