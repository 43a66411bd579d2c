// SPDX-License-Identifier: Apache-2.0
// Numbers and types that follow from the spec (scoring contract, sections 5 to 11).
#pragma once

#include <ap_int.h>
#include <hls_stream.h>

#include <cstdint>

#include "spec.h"

namespace hillinfer {

typedef ap_uint<512> Beat;
static_assert(sizeof(Beat) == 64, "buffers of beats are passed as plain memory");

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int floor_power_of_two(int a) { return a < 2 ? 1 : 2 * floor_power_of_two(a / 2); }

constexpr int SLICE_CHANNELS = 16;
constexpr int GROUP_TOKENS = 64;
constexpr int TUPLES_PER_BEAT = 16;
constexpr int INVALID_EXPONENT = 255;

// 16-channel slices of one head, and of all KV heads of a token.
constexpr int SLICES = HEAD_DIM / SLICE_CHANNELS;
constexpr int TOKEN_SLICES = KV_HEADS * SLICES;
// A row holds two slices of FP16 numbers a beat; heads follow each other without padding, so where
// SLICES is odd a beat can hold the end of one head and the start of the next.
constexpr int ROW_BEATS = ceil_div(TOKEN_SLICES, 2);

// Tokens of one tile of a shadow; as many codes of 16 channels fit one beat.
constexpr int SHADOW_TILE_TOKENS = 512 / (SLICE_CHANNELS * CODE_BITS);
constexpr int GROUP_TILES = GROUP_TOKENS / SHADOW_TILE_TOKENS;
constexpr int GROUP_BEATS = KV_HEADS + GROUP_TILES * TOKEN_SLICES;
// Tokens scored side by side: a tile, or one row.
constexpr int TILE_TOKENS = FP16_ROWS ? 1 : SHADOW_TILE_TOKENS;

// Query block and statistics block in beats.
constexpr int SCORED_HEADS = KV_HEADS * GROUP_HEADS;
constexpr int ADDEND_BEATS = ceil_div(SCORED_HEADS, 16);
constexpr int EXPONENT_BEATS = ceil_div(SCORED_HEADS, 64);
constexpr int QUERY_CODE_BEATS = ceil_div(SCORED_HEADS * HEAD_DIM, 64);
constexpr int QUERY_BLOCK_BEATS = ADDEND_BEATS + EXPONENT_BEATS + QUERY_CODE_BEATS;
constexpr int STATISTICS_BEATS = TOKEN_SLICES;
// Rounds that regroup the codes of a query block, and the whole block.
constexpr int CODE_ROUNDS = TOKEN_SLICES * GROUP_HEADS;
constexpr int ORDER_ROUNDS = ADDEND_BEATS + EXPONENT_BEATS + SCORED_HEADS + CODE_ROUNDS;

// Key beats arrive one per cycle, so this many cycles pass per KV head of a tile. The score units
// take as many steps as that allows, which says how few of them suffice.
constexpr int HEAD_CYCLES = FP16_ROWS ? SLICES / 2 : SLICES;
constexpr int HEADS_PER_STEP = ceil_div(GROUP_HEADS, HEAD_CYCLES);
constexpr int TILE_PARTS =
    smaller(TILE_TOKENS, floor_power_of_two(HEAD_CYCLES / ceil_div(GROUP_HEADS, HEADS_PER_STEP)));
constexpr int PART_TOKENS = TILE_TOKENS / TILE_PARTS;
constexpr int HEAD_STEPS = ceil_div(GROUP_HEADS, HEADS_PER_STEP);
constexpr int TILE_STEPS = KV_HEADS * HEAD_STEPS * TILE_PARTS;
// The score codes of a tile are made in as many parts as one KV head has cycles.
constexpr int CODE_PARTS = smaller(TILE_TOKENS, floor_power_of_two(HEAD_CYCLES));
constexpr int CODE_TOKENS = TILE_TOKENS / CODE_PARTS;

static_assert(HEAD_DIM % SLICE_CHANNELS == 0 && HEAD_DIM >= 64 && HEAD_DIM <= 256, "head_dim");
static_assert(KV_HEADS >= 1 && KV_HEADS <= 40 && GROUP_HEADS >= 1 && GROUP_HEADS <= 8, "heads");
static_assert(BLOCK_TOKENS % TUPLES_PER_BEAT == 0, "a score block is whole beats");
static_assert(HEAD_STEPS * TILE_PARTS <= HEAD_CYCLES, "the score units must keep up");

typedef ap_int<8> QueryCode;
typedef ap_int<CODE_BITS> KeyCode;
// A sum over one slice (|q| <= 127, |k| <= 128, 16 channels), and over a head: |P| < 2^22.
typedef ap_int<20> SliceSum;
typedef ap_int<23> HeadSum;

// Words are read and written whole, in one cycle: memories and registers of them are AGGREGATEd,
// so that a word is one wide number and not one memory per field.

// The query codes of one KV head and slice, for every query head that reads that KV head.
struct QueryWord {
    QueryCode code[GROUP_HEADS][SLICE_CHANNELS];
};

// What the score unit adds and shifts by, per query head of one KV head.
struct HeadWord {
    ap_int<32> addend[GROUP_HEADS];
    ap_int<8> exponent[GROUP_HEADS];
};

// P of one KV head for the tokens of a tile.
struct SumWord {
    HeadSum sum[TILE_TOKENS][GROUP_HEADS];
};

// Token exponents of one KV head.
template <int TOKENS>
struct Exponents {
    ap_uint<8> exponent[TOKENS];
};
typedef Exponents<TILE_TOKENS> ExponentWord;

// Key codes of two slices of one token, cast from a beat of FP16 numbers.
struct CodePair {
    KeyCode code[2][SLICE_CHANNELS];
};

// Beats of a shadow of so many tokens: full groups, then exponents and the tiles that hold tokens.
inline uint32_t shadow_beats(uint32_t tokens) {
#pragma HLS INLINE
    const uint32_t groups = tokens / GROUP_TOKENS;
    const uint32_t rest = tokens % GROUP_TOKENS;
    const uint32_t tiles = (rest + SHADOW_TILE_TOKENS - 1) / SHADOW_TILE_TOKENS;
    const uint32_t last = rest == 0 ? 0 : KV_HEADS + tiles * TOKEN_SLICES;
    return groups * GROUP_BEATS + last;
}

}  // namespace hillinfer
