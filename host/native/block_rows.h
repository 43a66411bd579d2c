// SPDX-License-Identifier: Apache-2.0
// Copies rows between the drive's layout and the blocks of another engine's KV cache.
#pragma once
#include <cstdint>

namespace hillinfer {

// Rows of tokens that follow one another, K of all KV heads and then V, and the blocks of a layer, so
// many bytes apart. A block is (kv_heads, 2 · block_tokens · head_dim) items. `order` says where in a head's part the
// items of its keys, then of its values lie, (2, block_tokens, head_dim); null where keys are
// (head_dim, block_tokens) and values (block_tokens, head_dim) behind them.
//
// Rows begin at `position` of a prompt, whose blocks are `numbers` from its first token on. Only
// tokens from `first` up to `stop` go anywhere. Where `salts` is given, rows are whole groups of 64
// tokens, and each group's CRC-32C behind its salt is written to `sums`: whoever compares them then
// knows whether what was placed is right.
struct BlockRows {
    uint8_t* rows;
    int64_t tokens;
    int64_t row_bytes;
    int64_t position;
    int64_t first;
    int64_t stop;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_tokens;
    int64_t item_bytes;
    int64_t block_bytes;
    uint8_t* blocks;
    const int64_t* numbers;
    const int32_t* order;
    const uint32_t* salts;
    uint32_t* sums;
};

}  // namespace hillinfer
