// SPDX-License-Identifier: Apache-2.0
// Takes the beats of a shadow apart into exponents and codes (scoring contract, section 9).
#pragma once

#include "commands.h"

namespace hillinfer {

// A group starts with one exponent beat per KV head; a short last group is a prefix of a full one.
inline void split_shadow(hls::stream<WorkCommand> &commands, hls::stream<Beat> &keys,
                         hls::stream<Beat> &exponent_beats, hls::stream<Beat> &code_beats) {
    WorkCommand c;
    uint32_t left = 0;  // beats of the segment
    int within = 0;
    bool open = true;
split_rounds:
    // recurrence: beats left and place within the group, one increment; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        Beat beat;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
                within = 0;
            }
        } else if (keys.read_nb(beat)) {
            if (within < KV_HEADS) {
                exponent_beats.write(beat);
            } else {
                code_beats.write(beat);
            }
            within = within == GROUP_BEATS - 1 ? 0 : within + 1;
            --left;
        }
    }
}

// Hands the exponents of each tile and KV head to `score`, in the order of its sums.
inline void spread_exponents(hls::stream<WorkCommand> &commands, hls::stream<Beat> &exponent_beats,
                             hls::stream<ExponentWord> &exponents) {
    Beat held[KV_HEADS];
    WorkCommand c;
    uint32_t left = 0;  // words of the segment
    int tile = 0;
    int kv_head = 0;
    bool open = true;
spread_rounds:
    // recurrence: the held beat of a KV head, one shift; distance KV_HEADS, at least 1
    // A word leaves once per 16-channel slice of a head at most, so an II of 2 is enough.
    while (open) {
#pragma HLS PIPELINE II=2 style=stp
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
                tile = 0;
            }
        } else {
            Beat beat = held[kv_head];
            bool here = true;
            if (tile == 0) here = exponent_beats.read_nb(beat);
            if (here) {
                ExponentWord word;
                for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                    word.exponent[i] = beat.range(8 * i + 7, 8 * i);
                }
                exponents.write(word);
                held[kv_head] = beat >> (8 * TILE_TOKENS);
                if (kv_head == KV_HEADS - 1) tile = tile == GROUP_TILES - 1 ? 0 : tile + 1;
                kv_head = kv_head == KV_HEADS - 1 ? 0 : kv_head + 1;
                --left;
            }
        }
    }
}

}  // namespace hillinfer
