// SPDX-License-Identifier: Apache-2.0
#include "selection.h"

#include <cstddef>
#include <vector>

namespace hillinfer {

// A score code has 16 bits, so one count of each says which code the last place falls to; of that
// code the lower positions win, which a walk in position order gives for nothing.
void select_top(const uint32_t* tuples, int64_t tokens, const int64_t* kept, int64_t kept_count,
                int64_t count, int64_t* out) {
    std::vector<uint32_t> histogram(1 << 16);
    for (int64_t i = 0; i < tokens; ++i) {
        ++histogram[tuples[i] >> 16];
    }
    for (int64_t i = 0; i < kept_count; ++i) {
        --histogram[tuples[kept[i]] >> 16];
    }
    int64_t free_places = count - kept_count;
    int32_t lowest = (1 << 16) - 1;
    while (lowest > 0 && int64_t(histogram[std::size_t(lowest)]) <= free_places) {
        free_places -= histogram[std::size_t(lowest--)];
    }
    // Every code above `lowest` is in; of `lowest` as many as places are left.
    int64_t next_kept = 0;
    for (int64_t i = 0; i < tokens; ++i) {
        const int32_t code = int32_t(tuples[i] >> 16);
        if (next_kept < kept_count && kept[next_kept] == i) {
            ++next_kept;
            *out++ = i;
        } else if (code > lowest) {
            *out++ = i;
        } else if (code == lowest && free_places > 0) {
            --free_places;
            *out++ = i;
        }
    }
}

}  // namespace hillinfer
