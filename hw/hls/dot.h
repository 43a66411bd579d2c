// SPDX-License-Identifier: Apache-2.0
// Inner products of every key with the query codes of its segment, one key beat per cycle.
//
// The query codes of a segment lie on chip twice: while one segment is multiplied, the codes of the
// next one are filled in as they come, a word per cycle. A segment starts when its codes are there.
// They are never waited for inside a segment: a process that waited for the next segment while it
// works on this one could keep this one from ever ending.
#pragma once

#include "commands.h"
#include "products.h"

namespace hillinfer {

// Over a shadow: a beat holds one slice of one KV head for the tokens of a tile.
inline void dot_shadow(hls::stream<WorkCommand> &commands, hls::stream<QueryWord> &queries,
                       hls::stream<Beat> &code_beats, hls::stream<SumWord> &sums) {
    QueryWord held[2][TOKEN_SLICES];
#pragma HLS AGGREGATE variable=held
    // A round writes into the half that it does not read, and a round that changes halves lies
    // between the last write and the first read.
#pragma HLS DEPENDENCE variable=held type=intra dependent=false
#pragma HLS DEPENDENCE variable=held type=inter direction=RAW distance=2 dependent=true
    HeadSum partial[TILE_TOKENS][GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=partial complete dim=0
    int slot = 0;    // half of `held` in use
    int loaded = 0;  // words of the next segment in the other half
    WorkCommand c;
    bool told = false;  // whether `c` waits for its queries
    uint32_t left = 0;  // beats of the segment
    int word = 0;
    int slice = 0;
    bool open = true;
dot_rounds:
    // recurrence: partial sums of a tile, one 23-bit addition; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        Beat beat;
        if (left == 0) {
            if (!told) told = commands.read_nb(c);
            if (told && (c.end || loaded == TOKEN_SLICES)) {
                open = !c.end;
                left = c.rounds;
                told = false;
                slot = 1 - slot;
                loaded = 0;
            }
        } else if (code_beats.read_nb(beat)) {
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
            --left;
        }
        QueryWord coming;
        if (loaded < TOKEN_SLICES && queries.read_nb(coming)) {
            held[1 - slot][loaded] = coming;
            ++loaded;
        }
    }
}

// Over rows: a beat holds two slices of one token, which can belong to two KV heads.
inline void dot_rows(hls::stream<WorkCommand> &commands, hls::stream<QueryWord> &queries,
                     hls::stream<CodePair> &codes, hls::stream<SumWord> &sums) {
    // Slices 2n and 2n + 1 lie in banks of their own, because they are read together.
    QueryWord even[2][ROW_BEATS];
    QueryWord odd[2][ROW_BEATS];
#pragma HLS AGGREGATE variable=even
#pragma HLS AGGREGATE variable=odd
    // A round writes into the half that it does not read, and a round that changes halves lies
    // between the last write and the first read.
#pragma HLS DEPENDENCE variable=even type=intra dependent=false
#pragma HLS DEPENDENCE variable=odd type=intra dependent=false
#pragma HLS DEPENDENCE variable=even type=inter direction=RAW distance=2 dependent=true
#pragma HLS DEPENDENCE variable=odd type=inter direction=RAW distance=2 dependent=true
    HeadSum partial[GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=partial complete dim=0
    int slot = 0;    // half of `even` and `odd` in use
    int loaded = 0;  // words of the next segment in the other half
    WorkCommand c;
    bool told = false;  // whether `c` waits for its queries
    uint32_t left = 0;  // beats of the segment
    int row_beat = 0;
    int slice = 0;
    bool open = true;
dot_rounds:
    // recurrence: partial sums of a head, one 23-bit addition; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        CodePair pair;
        if (left == 0) {
            if (!told) told = commands.read_nb(c);
            if (told && (c.end || loaded == TOKEN_SLICES)) {
                open = !c.end;
                left = c.rounds;
                told = false;
                slot = 1 - slot;
                loaded = 0;
            }
        } else if (codes.read_nb(pair)) {
            SliceSum low[1][GROUP_HEADS];
            SliceSum high[1][GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=low complete dim=0
#pragma HLS ARRAY_PARTITION variable=high complete dim=0
            slice_products<1>(&pair.code[0], even[slot][row_beat], low);
            slice_products<1>(&pair.code[1], odd[slot][row_beat], high);
            // The low slice can end one head and the high slice start the next one.
            const bool low_ends_head = slice == SLICES - 1;
            const bool high_ends_head = slice == SLICES - 2;
            SumWord out;
            for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                const ap_int<21> both = low[0][r] + high[0][r];
                const ap_int<21> of_this_head = low_ends_head ? ap_int<21>(low[0][r]) : both;
                const HeadSum before = slice == 0 ? HeadSum(0) : partial[r];
                const HeadSum sum = before + of_this_head;
                out.sum[0][r] = sum;
                partial[r] = low_ends_head ? HeadSum(high[0][r]) : sum;
            }
            if (low_ends_head || high_ends_head) sums.write(out);
            // Where a row has an odd number of slices, its last half beat is padding.
            const bool row_ends = row_beat == ROW_BEATS - 1;
            if (row_ends || high_ends_head) {
                slice = 0;
            } else {
                slice = low_ends_head ? 1 : slice + 2;
            }
            row_beat = row_ends ? 0 : row_beat + 1;
            --left;
        }
        QueryWord coming;
        if (loaded < TOKEN_SLICES && queries.read_nb(coming)) {
            if (loaded % 2 == 0) {
                even[1 - slot][loaded / 2] = coming;
            } else {
                odd[1 - slot][loaded / 2] = coming;
            }
            ++loaded;
        }
    }
}

}  // namespace hillinfer
