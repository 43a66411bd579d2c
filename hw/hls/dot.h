// SPDX-License-Identifier: Apache-2.0
// Inner products of every key with the query codes of its segment, one key beat per cycle.
//
// The query codes of a segment lie on chip twice: while one segment is multiplied, the codes of the
// next one are filled in as they come, a word per cycle. Only what is still missing when a segment
// starts is waited for: a process that waited for the next segment while it works on this one could
// keep this one from ever ending.
#pragma once

#include "commands.h"
#include "products.h"

namespace hillinfer {

// Over a shadow: a beat holds one slice of one KV head for the tokens of a tile.
inline void dot_shadow(hls::stream<WorkCommand> &commands, hls::stream<QueryWord> &queries,
                       hls::stream<Beat> &code_beats, hls::stream<SumWord> &sums) {
    QueryWord held[2][TOKEN_SLICES];
    HeadSum partial[TILE_TOKENS][GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=partial complete dim=0
    int slot = 0;
    int loaded = 0;
    WorkCommand c = commands.read();
dot_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
    dot_missing_queries:
        // recurrence: none
        for (int w = loaded; w < TOKEN_SLICES; ++w) {
#pragma HLS PIPELINE II=1
            held[slot][w] = queries.read();
        }
        loaded = 0;
        const uint32_t tiles = (c.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
        const uint32_t beats = tiles * TOKEN_SLICES;
        int word = 0;
        int slice = 0;
    dot_beats:
        // recurrence: partial sums of a tile, one 23-bit addition; distance 1
        for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
            // One half of `held` is read while the other is written.
#pragma HLS DEPENDENCE variable=held type=inter false
            QueryWord coming;
            if (loaded < TOKEN_SLICES && queries.read_nb(coming)) {
                held[1 - slot][loaded] = coming;
                ++loaded;
            }
            const Beat beat = code_beats.read();
            KeyCode keys[TILE_TOKENS][SLICE_CHANNELS];
#pragma HLS ARRAY_PARTITION variable=keys complete dim=0
            for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                    const int bit = CODE_BITS * (SLICE_CHANNELS * i + j);
                    keys[i][j] = beat.range(bit + CODE_BITS - 1, bit);
                }
            }
            SliceSum products[TILE_TOKENS][GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=products complete dim=0
            slice_products<TILE_TOKENS>(keys, held[slot][word], products);
            SumWord out;
            for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                    const HeadSum before = slice == 0 ? HeadSum(0) : partial[i][r];
                    partial[i][r] = before + products[i][r];
                    out.sum[i][r] = partial[i][r];
                }
            }
            if (slice == SLICES - 1) sums.write(out);
            slice = slice == SLICES - 1 ? 0 : slice + 1;
            word = word == TOKEN_SLICES - 1 ? 0 : word + 1;
        }
        slot = 1 - slot;
        c = commands.read();
    }
}

// Over rows: a beat holds two slices of one token, which can belong to two KV heads.
inline void dot_rows(hls::stream<WorkCommand> &commands, hls::stream<QueryWord> &queries,
                     hls::stream<CodePair> &codes, hls::stream<SumWord> &sums) {
    // Slices 2n and 2n + 1 lie in banks of their own, because they are read together.
    QueryWord even[2][ROW_BEATS];
    QueryWord odd[2][ROW_BEATS];
    HeadSum partial[GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=partial complete dim=0
    int slot = 0;
    int loaded = 0;
    WorkCommand c = commands.read();
dot_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
    dot_missing_queries:
        // recurrence: none
        for (int w = loaded; w < TOKEN_SLICES; ++w) {
#pragma HLS PIPELINE II=1
            const QueryWord query = queries.read();
            if (w % 2 == 0) {
                even[slot][w / 2] = query;
            } else {
                odd[slot][w / 2] = query;
            }
        }
        loaded = 0;
        const uint32_t beats = c.tokens * ROW_BEATS;
        int row_beat = 0;
        int slice = 0;
    dot_beats:
        // recurrence: partial sums of a head, two 23-bit additions; distance 1
        for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
            // One half of `even` and `odd` is read while the other is written.
#pragma HLS DEPENDENCE variable=even type=inter false
#pragma HLS DEPENDENCE variable=odd type=inter false
            QueryWord coming;
            if (loaded < TOKEN_SLICES && queries.read_nb(coming)) {
                if (loaded % 2 == 0) {
                    even[1 - slot][loaded / 2] = coming;
                } else {
                    odd[1 - slot][loaded / 2] = coming;
                }
                ++loaded;
            }
            const CodePair pair = codes.read();
            SliceSum low[1][GROUP_HEADS];
            SliceSum high[1][GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=low complete dim=0
#pragma HLS ARRAY_PARTITION variable=high complete dim=0
            slice_products<1>(&pair.code[0], even[slot][row_beat], low);
            slice_products<1>(&pair.code[1], odd[slot][row_beat], high);
            const bool low_ends_head = slice == SLICES - 1;
            const int high_slice = low_ends_head ? 0 : slice + 1;
            const bool high_ends_head = high_slice == SLICES - 1;
            SumWord out;
            for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                const HeadSum before = slice == 0 ? HeadSum(0) : partial[r];
                const HeadSum with_low = before + low[0][r];
                const HeadSum with_both = (low_ends_head ? HeadSum(0) : with_low) + high[0][r];
                out.sum[0][r] = low_ends_head ? with_low : with_both;
                partial[r] = with_both;
            }
            if (low_ends_head || high_ends_head) sums.write(out);
            // Where a row has an odd number of slices, its last half beat is padding.
            const bool row_ends = row_beat == ROW_BEATS - 1;
            slice = row_ends || high_ends_head ? 0 : high_slice + 1;
            row_beat = row_ends ? 0 : row_beat + 1;
        }
        slot = 1 - slot;
        c = commands.read();
    }
}

}  // namespace hillinfer
