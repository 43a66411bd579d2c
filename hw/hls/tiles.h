// SPDX-License-Identifier: Apache-2.0
// Turns codes that come token by token into the tiles and exponent beats of a shadow (scoring
// contract, section 9).
#pragma once

#include "commands.h"

namespace hillinfer {

// A tile is gathered in one half of a memory while the tile before it leaves from the other; that
// goes on across segments. Neither side waits for the other within a round, so the last tile of a
// segment leaves whether or not another segment comes.
inline void make_tiles(hls::stream<WorkCommand> &commands, hls::stream<CodePair> &codes,
                       hls::stream<Beat> &tile_beats) {
    typedef ap_uint<SLICE_CHANNELS * CODE_BITS> Lane;
    // One bank per token of a tile, and one for slices 2n and 2n + 1 each.
    Lane even[2][SHADOW_TILE_TOKENS][ROW_BEATS];
    Lane odd[2][SHADOW_TILE_TOKENS][ROW_BEATS];
#pragma HLS ARRAY_PARTITION variable=even complete dim=2
#pragma HLS ARRAY_PARTITION variable=odd complete dim=2
    // A round writes into the half that it does not read. The first slice that leaves was written
    // ROW_BEATS (2 or more) rounds before, and every further one longer ago.
#pragma HLS DEPENDENCE variable=even type=intra dependent=false
#pragma HLS DEPENDENCE variable=odd type=intra dependent=false
#pragma HLS DEPENDENCE variable=even type=inter direction=RAW distance=2 dependent=true
#pragma HLS DEPENDENCE variable=odd type=inter direction=RAW distance=2 dependent=true
    int slot = 0;  // the half being filled
    WorkCommand c;
    uint32_t coming_tokens = 0;  // of the segment
    uint32_t token = 0;          // within the tile
    int row_beat = 0;
    bool full = false;
    uint32_t leaving_tokens = 0;  // of the tile in the other half
    bool leaving = false;
    int slice = 0;  // of the tile that leaves
    bool open = true;
tile_rounds:
    // recurrence: places in both tiles, one increment; distance 1
    while (open || full || leaving) {
#pragma HLS PIPELINE II=1 style=stp
        if (leaving) {
            Beat beat = 0;
            for (uint32_t i = 0; i < SHADOW_TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                const int bit = SLICE_CHANNELS * CODE_BITS * i;
                const Lane lane = slice % 2 == 0 ? even[1 - slot][i][slice / 2]
                                                 : odd[1 - slot][i][slice / 2];
                // Padding tokens hold what an earlier tile left there.
                beat.range(bit + SLICE_CHANNELS * CODE_BITS - 1, bit) =
                    i < leaving_tokens ? lane : Lane(0);
            }
            tile_beats.write(beat);
            leaving = slice != TOKEN_SLICES - 1;
            slice = slice == TOKEN_SLICES - 1 ? 0 : slice + 1;
        }
        CodePair pair;
        if (coming_tokens != 0) {
            if (!full && codes.read_nb(pair)) {
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
                const bool row_ends = row_beat == ROW_BEATS - 1;
                row_beat = row_ends ? 0 : row_beat + 1;
                if (row_ends) {
                    full = token == SHADOW_TILE_TOKENS - 1 || coming_tokens == 1;
                    ++token;
                    --coming_tokens;
                }
            }
        } else if (open && commands.read_nb(c)) {
            open = !c.end;
            coming_tokens = c.rounds;
        }
        if (full && !leaving) {
            leaving = true;
            leaving_tokens = token;
            slot = 1 - slot;
            token = 0;
            full = false;
        }
    }
}

// The exponents of a group, one beat per KV head. The beats leave with the group's last token.
inline void gather_exponents(hls::stream<WorkCommand> &commands,
                             hls::stream<Exponents<1> > &exponents,
                             hls::stream<Beat> &exponent_beats) {
    Beat partial[KV_HEADS];
    WorkCommand c;
    uint32_t left = 0;   // exponents of the segment
    uint32_t token = 0;  // within the group
    int kv_head = 0;
    bool open = true;
gather_rounds:
    // recurrence: the beat of a KV head, one shift; distance KV_HEADS, at least 1
    // An exponent comes every HEAD_DIM / 32 (2 or more) cycles, so an II of 2 is enough.
    while (open) {
#pragma HLS PIPELINE II=2 style=stp
        Exponents<1> coming;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
                token = 0;
            }
        } else if (exponents.read_nb(coming)) {
            // Exponents enter at the top; 64 of them make a beat.
            Beat beat = token == 0 ? Beat(0) : Beat(partial[kv_head] >> 8);
            beat.range(511, 504) = coming.exponent[0];
            partial[kv_head] = beat;
            const bool last_token = left <= KV_HEADS;
            if (token == GROUP_TOKENS - 1 || last_token) {
                exponent_beats.write(beat >> (8 * (GROUP_TOKENS - 1 - token)));
            }
            if (kv_head == KV_HEADS - 1) token = token == GROUP_TOKENS - 1 ? 0 : token + 1;
            kv_head = kv_head == KV_HEADS - 1 ? 0 : kv_head + 1;
            --left;
        }
    }
}

}  // namespace hillinfer
