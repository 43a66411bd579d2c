// SPDX-License-Identifier: Apache-2.0
// The exact top of one selected set (scoring contract, section 8: code descending, position
// ascending).
#pragma once
#include <cstdint>

namespace hillinfer {

// Writes `count` <= stop - first positions, ascending: the best of first .. stop - 1. Returns where
// the next one would go.
int64_t* select_best(const uint32_t* tuples, int64_t first, int64_t stop, int64_t count,
                     int64_t* out);

}  // namespace hillinfer
