// SPDX-License-Identifier: Apache-2.0
// Tables of scoring kernels, as functions that each instruction set provides.
#pragma once
#include "shape.h"

namespace hillinfer {

// Channels that `statistics` takes at once.
constexpr int kStatisticsChannels = 32;
// Of a row's numbers that are the same for all groups of a segment.
constexpr int kRowWords = 4;

// Offsets and sums of one group on their way to tuples.
struct GroupInput {
    const uint8_t* group;
    const QueryCodes* query;
    const int8_t* arranged;  // From `arrange`.
    int32_t* products;       // Rows * 64; scratch, or of the first group where they are kept.
    int32_t* row_words;      // Scratch: rows * kRowWords.
    // From one group's products to the next one's, where `tuples` is to keep them; 0 where not.
    int64_t products_stride = 0;
};

// What is to be asked for while a tile is worked on: of a tile that comes soon to the first cache, of
// one that comes later to the second. As long as a tile.
struct TilesAhead {
    const uint8_t* near;
    const uint8_t* far;
};

// Tiles one behind the other from the one that is worked on, and at least `far` more.
struct TilesToCome {
    TilesAhead ahead() const { return {tiles[near], tiles[far]}; }

    const uint8_t* const* tiles;
    size_t near;
    size_t far;
};

struct Kernels {
    const char* name;
    // Bytes of a segment's query codes as `log_weights` and `tuples` read them.
    size_t (*arranged_bytes)(const Shape&);
    void (*arrange)(const Shape&, const int8_t* codes, int8_t* out);
    void (*code_query)(const Shape&, const float* scaled, const Segment&, const QueryCodes& out);
    // L' of a group of 64 tokens: rows * 64.
    void (*log_weights)(const Shape&, const GroupInput&, int32_t* out);
    // L' of some of the 64 tokens, a bit for each: out[row * stride + i] is that of the i-th one. Only
    // tiles that have some of them are read: the first of `coming`. Where it has none all products are
    // there already.
    void (*some_log_weights)(const Shape&, const GroupInput&, uint64_t tokens,
                             TilesToCome coming, int32_t* out, int64_t stride);
    // The tuples of a segment's groups from the given one on: out[set * stride + token], `tokens` of
    // them.
    void (*tuples)(const Shape&, const GroupInput&, const int32_t* offsets, int64_t position,
                   int64_t tokens, uint32_t* out, int64_t stride);
    // Those of one group from L' (rows * 64) and its exponents (kv_heads * 64).
    void (*finish)(const Shape&, const int32_t* log_weights, const uint8_t* exponents,
                   const int32_t* offsets, int64_t position, int tokens, uint32_t* out,
                   int64_t stride);
    // B of a head; see head_offset.h.
    int32_t (*log_sum)(const int32_t* log_weights, const uint8_t* invalid, int64_t count,
                       int64_t once, int64_t stride);
    // c and M of some channels of one KV head from its FP16 keys; strides in elements.
    void (*statistics)(const uint16_t* keys, int64_t token_stride, int64_t channel_stride,
                       int64_t tokens, int channels, int8_t* exponents, int32_t* means);
    // Codes tokens of FP16 keys into a segment's shadow; strides in elements.
    void (*encode)(const Shape&, const uint16_t* keys, int64_t token_stride, int64_t head_stride,
                   int64_t channel_stride, const Segment&, uint8_t* shadow, int64_t first_token,
                   int64_t tokens);
    // Codes tokens of FP16 values; strides in elements.
    void (*encode_values)(const Shape&, const uint16_t* values, int64_t token_stride,
                          int64_t head_stride, int64_t channel_stride, const Segment&,
                          const ValuePlaces& to, int64_t tokens);
    uint64_t (*read_sum)(const uint8_t* bytes, size_t count);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512Vnni;
#elif defined(__aarch64__)
extern const Kernels kNeonDot;
#endif

}  // namespace hillinfer
