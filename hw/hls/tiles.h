// SPDX-License-Identifier: Apache-2.0
// Turns codes that come token by token into the tiles and exponent beats of a shadow (scoring
// contract, section 5).
#pragma once

#include "commands.h"

namespace hillinfer {

// A tile is gathered in one half of a memory while the tile before it leaves from the other; that
// goes on across segments.
inline void make_tiles(hls::stream<WorkCommand> &commands, hls::stream<CodePair> &codes,
                       hls::stream<Beat> &tile_beats) {
    typedef ap_uint<SLICE_CHANNELS * CODE_BITS> Lane;
    // One bank per token of a tile, and one for slices 2n and 2n + 1 each.
    Lane even[2][SHADOW_TILE_TOKENS][ROW_BEATS];
    Lane odd[2][SHADOW_TILE_TOKENS][ROW_BEATS];
#pragma HLS ARRAY_PARTITION variable=even complete dim=2
#pragma HLS ARRAY_PARTITION variable=odd complete dim=2
    int slot = 0;
    uint32_t leaving_tokens = 0;  // of the tile in the other half
    WorkCommand c = commands.read();
tile_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t tiles = (c.tokens + SHADOW_TILE_TOKENS - 1) / SHADOW_TILE_TOKENS;
    tile_tiles:
        // recurrence: which half is filled; distance 1
        for (uint32_t t = 0; t < tiles; ++t) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=256
            const uint32_t rest = c.tokens - t * SHADOW_TILE_TOKENS;
            const uint32_t tokens = rest < SHADOW_TILE_TOKENS ? rest : SHADOW_TILE_TOKENS;
            const uint32_t coming = tokens * ROW_BEATS;
            const uint32_t leaving = leaving_tokens == 0 ? 0 : TOKEN_SLICES;
            const uint32_t steps = coming > leaving ? coming : leaving;
            int token = 0;
            int row_beat = 0;
        tile_steps:
            // recurrence: none
            for (uint32_t n = 0; n < steps; ++n) {
#pragma HLS PIPELINE II=1
                // One half of `even` and `odd` is read while the other is written.
#pragma HLS DEPENDENCE variable=even type=inter false
#pragma HLS DEPENDENCE variable=odd type=inter false
                if (n < coming) {
                    const CodePair pair = codes.read();
                    Lane low;
                    Lane high;
                    for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                        const int bit = CODE_BITS * j;
                        low.range(bit + CODE_BITS - 1, bit) = pair.code[0][j];
                        high.range(bit + CODE_BITS - 1, bit) = pair.code[1][j];
                    }
                    even[slot][token][row_beat] = low;
                    odd[slot][token][row_beat] = high;
                    if (row_beat == ROW_BEATS - 1) ++token;
                    row_beat = row_beat == ROW_BEATS - 1 ? 0 : row_beat + 1;
                }
                if (n < leaving) {
                    Beat beat = 0;
                    for (uint32_t i = 0; i < SHADOW_TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                        const int bit = SLICE_CHANNELS * CODE_BITS * i;
                        const Lane lane =
                            n % 2 == 0 ? even[1 - slot][i][n / 2] : odd[1 - slot][i][n / 2];
                        // Padding tokens hold what an earlier tile left there.
                        beat.range(bit + SLICE_CHANNELS * CODE_BITS - 1, bit) =
                            i < leaving_tokens ? lane : Lane(0);
                    }
                    tile_beats.write(beat);
                }
            }
            leaving_tokens = tokens;
            slot = 1 - slot;
        }
        c = commands.read();
    }
    const uint32_t last = leaving_tokens == 0 ? 0 : TOKEN_SLICES;
tile_last:
    // recurrence: none
    for (uint32_t n = 0; n < last; ++n) {
#pragma HLS PIPELINE II=1
        Beat beat = 0;
        for (uint32_t i = 0; i < SHADOW_TILE_TOKENS; ++i) {
#pragma HLS UNROLL
            const int bit = SLICE_CHANNELS * CODE_BITS * i;
            const Lane lane = n % 2 == 0 ? even[1 - slot][i][n / 2] : odd[1 - slot][i][n / 2];
            beat.range(bit + SLICE_CHANNELS * CODE_BITS - 1, bit) =
                i < leaving_tokens ? lane : Lane(0);
        }
        tile_beats.write(beat);
    }
}

// The exponents of a group, one beat per KV head. The beats leave with the group's last token.
inline void gather_exponents(hls::stream<WorkCommand> &commands,
                             hls::stream<Exponents<1> > &exponents,
                             hls::stream<Beat> &exponent_beats) {
    Beat partial[KV_HEADS];
    WorkCommand c = commands.read();
gather_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t words = c.tokens * KV_HEADS;
        uint32_t token = 0;
        int kv_head = 0;
    gather_words:
        // recurrence: the beat of a KV head, one shift; distance KV_HEADS, at least 1
        // An exponent comes every HEAD_DIM / 32 (2 or more) cycles, so an II of 2 is enough.
        for (uint32_t n = 0; n < words; ++n) {
#pragma HLS PIPELINE II=2
            const int place = token % GROUP_TOKENS;
            // Exponents enter at the top; 64 of them make a beat.
            Beat beat = place == 0 ? Beat(0) : Beat(partial[kv_head] >> 8);
            beat.range(511, 504) = exponents.read().exponent[0];
            partial[kv_head] = beat;
            if (place == GROUP_TOKENS - 1 || token == c.tokens - 1) {
                exponent_beats.write(beat >> (8 * (GROUP_TOKENS - 1 - place)));
            }
            if (kv_head == KV_HEADS - 1) ++token;
            kv_head = kv_head == KV_HEADS - 1 ? 0 : kv_head + 1;
        }
        c = commands.read();
    }
}

}  // namespace hillinfer
