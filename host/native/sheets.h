// SPDX-License-Identifier: Apache-2.0
// Sheets that extents begin with, compared with what a prompt wants of them; see store/extent.py.
#pragma once
#include <cstdint>

namespace hillinfer {

// Of chunks of one chain, each 1,024 tokens of it. All arrays have an entry for each.
struct SheetMatch {
    const uint8_t* data;   // What extents begin with: two headers, two bodies.
    int64_t count;
    int64_t extent_bytes;  // Distance of two.
    int64_t body_bytes;
    const uint8_t* said;     // What every header says of the store and the namespace, 48 bytes.
    const uint8_t* parents;  // Keys of what comes before, 32 bytes each.
    const uint8_t* keys;     // Keys of the groups, 16 times 32 bytes each.
    const uint8_t* ids;      // Token numbers, 4,096 bytes each.
    const int32_t* groups;   // Of those, how many groups are wanted.
    int32_t* covered;        // Two each, of either sheet.
    uint32_t version;
    uint32_t layers;
    uint32_t row_bytes;
    uint32_t shadow_bytes;
};

// Of what a sheet covers: nothing where it is not whole or not of the prompt, all of its groups
// where these are wanted, or below 0 where it has more, which are to be hashed first.
void match_sheets(const SheetMatch& match);

}  // namespace hillinfer
