// SPDX-License-Identifier: Apache-2.0
// Checksums of rows, by which bytes are known that came back from a drive as they were written.
#pragma once
#include <cstdint>

namespace hillinfer {

// Writes a sum of each row to `sums`. Row i lies at `memory` + places[i] · row_bytes, and row_bytes is
// a multiple of 64.
//
// Eight lanes of 64 bits, as many instructions as reading takes: a product of both halves of each
// word with a key of its place, plus the word itself in the neighbour's lane. Every changed word
// changes a lane; of other changes, one in 2^32 keeps a sum. Nobody who wants to deceive is kept out.
void row_sums(const uint8_t* memory, int64_t row_bytes, const int64_t* places, int64_t count,
              uint32_t* sums);

}  // namespace hillinfer
