// SPDX-License-Identifier: Apache-2.0
#include "selection.h"

namespace hillinfer {

// A score code has 16 bits, so one count of each says which code the last place falls to; of that
// code the lower positions win, which a walk in position order gives for nothing.
//
// Counts of 2^8 high bytes and then of the low bytes below one of them stay in the nearest memory,
// where counts of every code do not.
int64_t* select_best(const uint32_t* tuples, int64_t first, int64_t stop, int64_t count,
                     int64_t* out) {
    int64_t left = count;
    // The byte that the last place falls to; what is above it takes its places first.
    const auto last_place = [&left](const uint32_t* counts) {
        int32_t byte = 255;
        while (byte > 0 && int64_t(counts[byte]) <= left) {
            left -= counts[byte--];
        }
        return byte;
    };
    // Equal bytes follow on each other, so each of four tokens counts for itself.
    uint32_t high[4][256] = {};
    int64_t i = first;
    for (; i + 4 <= stop; i += 4) {
        for (int part = 0; part < 4; ++part) {
            ++high[part][tuples[i + part] >> 24];
        }
    }
    for (; i < stop; ++i) {
        ++high[0][tuples[i] >> 24];
    }
    for (int byte = 0; byte < 256; ++byte) {
        high[0][byte] += high[1][byte] + high[2][byte] + high[3][byte];
    }
    const uint32_t upper = uint32_t(last_place(high[0]));
    uint32_t low[256] = {};
    for (i = first; i < stop; ++i) {
        low[tuples[i] >> 16 & 255] += tuples[i] >> 24 == upper;
    }
    const uint32_t lowest = upper << 8 | uint32_t(last_place(low));
    // Every code above `lowest` is in; of `lowest` as many as places are left, lower positions first.
    // No branch hangs on a score: a tenth of them, here and there, is what nobody can foresee.
    int64_t* const end = out + count;
    for (i = first; out < end; ++i) {
        const uint32_t code = tuples[i] >> 16;
        const bool equal = code == lowest;
        *out = i;
        out += (code > lowest) | (equal & (left > 0));
        left -= equal;
    }
    return out;
}

}  // namespace hillinfer
