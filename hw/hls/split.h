// SPDX-License-Identifier: Apache-2.0
// Takes the beats of a shadow apart into exponents and codes (scoring contract, section 5).
#pragma once

#include "commands.h"

namespace hillinfer {

// A group starts with one exponent beat per KV head; a short last group is a prefix of a full one.
inline void split_shadow(hls::stream<WorkCommand> &commands, hls::stream<Beat> &keys,
                         hls::stream<Beat> &exponent_beats, hls::stream<Beat> &code_beats) {
    WorkCommand c = commands.read();
split_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t beats = shadow_beats(c.tokens);
        int within = 0;
    split_beats:
        // recurrence: place within the group, one increment; distance 1
        for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
            const Beat beat = keys.read();
            if (within < KV_HEADS) {
                exponent_beats.write(beat);
            } else {
                code_beats.write(beat);
            }
            within = within == GROUP_BEATS - 1 ? 0 : within + 1;
        }
        c = commands.read();
    }
}

// Hands the exponents of each tile and KV head to `score`, in the order of its sums.
inline void spread_exponents(hls::stream<WorkCommand> &commands, hls::stream<Beat> &exponent_beats,
                             hls::stream<ExponentWord> &exponents) {
    Beat held[KV_HEADS];
    WorkCommand c = commands.read();
spread_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t tiles = (c.tokens + SHADOW_TILE_TOKENS - 1) / SHADOW_TILE_TOKENS;
        const uint32_t words = tiles * KV_HEADS;
        int tile = 0;
        int kv_head = 0;
    spread_words:
        // recurrence: the held beat of a KV head, one shift; distance KV_HEADS, at least 1
        // A word leaves once per 16-channel slice of a head at most, so an II of 2 is enough.
        for (uint32_t n = 0; n < words; ++n) {
#pragma HLS PIPELINE II=2
            Beat beat = tile == 0 ? exponent_beats.read() : held[kv_head];
            ExponentWord word;
            for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                word.exponent[i] = beat.range(8 * i + 7, 8 * i);
            }
            exponents.write(word);
            held[kv_head] = beat >> (8 * TILE_TOKENS);
            if (kv_head == KV_HEADS - 1) tile = tile == GROUP_TILES - 1 ? 0 : tile + 1;
            kv_head = kv_head == KV_HEADS - 1 ? 0 : kv_head + 1;
        }
        c = commands.read();
    }
}

}  // namespace hillinfer
