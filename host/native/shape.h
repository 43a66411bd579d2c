// SPDX-License-Identifier: Apache-2.0
// Arguments of scoring calls: shapes, rules, query codes and segments (contract, sections 1 to 9).
#pragma once
#include <cstddef>
#include <cstdint>

namespace hillinfer {

constexpr int kGroupTokens = 64;
constexpr int kBeatBytes = 64;
constexpr int kSliceChannels = 16;
constexpr int kInvalidExponent = 255;
constexpr int kMostQueryHeads = 64;  // Of one KV head.

// A code row has 16 bytes for so many channels: the first half in the low nibbles.
constexpr int kCodeBlockChannels = 32;

// Channels of a head in a value shadow (contract, section 14).
inline int value_dim(int head_dim) {
    const int whole = (head_dim + kCodeBlockChannels - 1) / kCodeBlockChannels * kCodeBlockChannels;
    return whole < 64 ? 64 : whole;
}

enum Rule : int32_t { kWeightSum = 0, kRawSum = 1 };
enum Scope : int32_t { kLayer = 0, kKvHead = 1 };

// Shared with Python: the order and types of these fields are part of the C interface.
struct Shape {
    int32_t kv_heads;
    int32_t heads;  // Query rows of one KV head: G, or 1 where queries are summed first.
    int32_t head_dim;
    int32_t padded_dim;
    int32_t code_bits;
    int32_t rule;
    int32_t scope;
    int32_t segment_tokens;

    int slices() const { return padded_dim / kSliceChannels; }
    int rows() const { return kv_heads * heads; }
    int sets() const { return scope == kLayer ? 1 : kv_heads; }
    int tile_tokens() const { return 32 / code_bits; }
    int tiles() const { return kGroupTokens / tile_tokens(); }
    // Bytes of one token's 16 codes of one slice.
    int piece_bytes() const { return 2 * code_bits; }
    size_t tile_bytes() const { return size_t(kv_heads) * slices() * kBeatBytes; }
    // Scoring so many tokens, as bytes: each query head takes every code, and of narrower codes a byte
    // has more. A MiB of it takes about 0.1 ms with vectors, whatever the shape (0.04 to 0.3, on a busy machine).
    int64_t work_bytes(int64_t tokens) const {
        const int64_t bytes = tokens * int64_t(group_bytes()) / kGroupTokens;
        return bytes * heads * (8 / code_bits) / 8;
    }
    // Of the value shadow: one token's codes, and a group's exponents and code rows.
    size_t code_row_bytes() const { return size_t(kv_heads) * value_dim(head_dim) / 2; }
    size_t value_group_bytes() const {
        return size_t(kv_heads) * kBeatBytes + kGroupTokens * code_row_bytes();
    }
    size_t group_bytes() const { return size_t(kv_heads) * kBeatBytes + tiles() * tile_bytes(); }
};

// One segment as Python holds it; nothing is copied.
struct Segment {
    const uint8_t* shadow;
    const int8_t* exponents;  // c, kv_heads * head_dim.
    const int32_t* means;     // M, likewise.
    const uint8_t* probes;    // Groups of every 16th token, or null: they are gathered.
    int64_t tokens;
};

// Where consecutive tokens' code rows go, and their exponents; strides in bytes.
struct ValuePlaces {
    uint8_t* rows;
    int64_t row_stride;
    uint8_t* exponents;  // Of the first token in the first KV head.
    int64_t token_stride;
    int64_t head_stride;
};

// The query as one segment's keys see it: `rows` of each.
struct QueryCodes {
    int8_t* codes;         // rows * padded_dim, padding 0.
    int32_t* exponents;    // s_h.
    int32_t* corrections;  // o_h.
    int32_t* sums;         // Of the codes.
};

}  // namespace hillinfer
