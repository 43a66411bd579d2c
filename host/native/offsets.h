// SPDX-License-Identifier: Apache-2.0
// Offsets B and A from L' of the tokens that every execution looks at (contract, section 6).
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace hillinfer {

constexpr int64_t kSinks = 4;
constexpr int64_t kRecent = 256;
constexpr int64_t kStride = 16;

// Where the tokens R and then the probe tokens outside it lie among those that have keys.
struct OffsetTokens {
    // N, what is coming included.
    explicit OffsetTokens(int64_t all);

    int64_t recent;  // The first of the most recent tokens.
    int64_t sinks;   // Sinks that are not recent tokens.
    int64_t probes;  // Positions 16, 32, ... below `recent`.

    int64_t once(int64_t tokens) const { return sinks + tokens - recent; }
    int64_t all(int64_t tokens) const { return once(tokens) + probes; }

    // Index of a position among them, or -1.
    int64_t place(int64_t position, int64_t tokens) const;
};

// L' of the offset tokens, a row of them per scored head; marks per KV head.
struct OffsetSample {
    OffsetSample(const Shape& shape, int64_t tokens, int64_t coming);

    int64_t tokens;
    OffsetTokens where;
    int64_t count;
    std::vector<int32_t> log_weights;  // rows * count
    std::vector<uint8_t> invalid;      // kv_heads * count
};

// B of each row of the sample, or A of each set.
std::vector<int32_t> sequence_offsets(const Kernels& kernels, const Shape& shape,
                                      const OffsetSample& sample, int threads);

}  // namespace hillinfer
