// SPDX-License-Identifier: Apache-2.0
// Converts rows as a drive has them to keys and values of a cache in memory, checked on the way.
#pragma once
#include <cstdint>

namespace hillinfer {

// Rows of tokens that follow one another, K of all KV heads and then V, in a stored type. Keys and
// values are (kv_heads, room, head_dim), float where they are widened and of the stored type else;
// both point to where the first head's first of these tokens goes, and `room_items` is the distance
// of two heads.
struct StateRows {
    const uint8_t* rows;
    int64_t tokens;
    int64_t row_bytes;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t room_items;
    uint8_t* keys;
    uint8_t* values;
    int32_t stored_type;
    int32_t is_widened;
};

// The same, checked on the way: rows are whole groups of 64 tokens, of which only the first `placed`
// tokens go anywhere. Each group's CRC-32C behind its salt is written to `sums`; whoever compares
// them then knows whether what was placed is right.
struct CheckedRows {
    StateRows states;
    int64_t placed;
    const uint32_t* salts;
    uint32_t* sums;
};

// Checks and places one of these groups, which several threads may do at once.
void land_group(const CheckedRows& given, int64_t group);

}  // namespace hillinfer
