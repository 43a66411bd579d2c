// SPDX-License-Identifier: Apache-2.0
// Where the rows of selected positions lie: in a hot pool's slots, in the open group, or on the
// drive alone.
#include "api.h"

namespace {

constexpr int64_t kGroupTokens = 64;

}  // namespace

// Writes the address of each position's row to `out`, 0 where it is on the drive alone, and stamps
// the slots of hot ones with the step. Positions below `settled` are in full groups and may be hot;
// those from `held` to `length` lie behind `tail`. Returns 0, or -1 for a position that is nowhere.
HILLINFER_API int64_t hillinfer_row_places(const int64_t* positions, int64_t count, int64_t settled,
                                           int64_t held, int64_t length, uint64_t tail,
                                           const int64_t* groups, int64_t group_count,
                                           const int32_t* slot_of_row, int64_t row_count,
                                           int32_t* stamps, int32_t step, uint64_t slots,
                                           int64_t row_bytes, uint64_t* out) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = positions[i];
        if (position < 0 || position >= length) {
            return -1;
        }
        int32_t slot = -1;
        if (position < settled) {
            const int64_t group = position / kGroupTokens;
            const int64_t row = group < group_count
                                    ? groups[group] * kGroupTokens + position % kGroupTokens
                                    : -1;
            if (row < 0 || row >= row_count) {
                return -1;
            }
            slot = slot_of_row[row];
            if (slot >= 0) {
                stamps[slot] = step;
            }
        }
        if (position >= held) {
            if (position - held >= kGroupTokens) {
                return -1;
            }
            out[i] = tail + uint64_t((position - held) * row_bytes);
        } else {
            out[i] = slot >= 0 ? slots + uint64_t(slot) * uint64_t(row_bytes) : 0;
        }
    }
    return 0;
}
