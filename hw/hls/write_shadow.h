// SPDX-License-Identifier: Apache-2.0
// Last process of `make_shadow`: groups and status beats (bundle gmem2).
//
// A group's exponents lie in front of its tiles but are known after them, so the tiles are written
// first. Status follows on the same port, behind the write responses, as in write_scores.h. So
// each group is two bursts, and the process drains after each of them.
#pragma once

#include "status.h"

namespace hillinfer {

inline void write_shadow(uint32_t launch_id, hls::stream<WriteCommand> &commands,
                         hls::stream<Beat> &tile_beats, hls::stream<Beat> &exponent_beats,
                         Beat *shadow, Beat *status) {
    uint32_t segment = 0;
    WriteCommand c = commands.read();
write_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        uint32_t done = 0;
        uint32_t counted = 0;
        uint64_t exponent_place = c.target;
    write_groups:
        // recurrence: place of the group, one 64-bit addition; distance 1
        while (done < c.tokens) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=16
            const uint32_t rest = c.tokens - done;
            const uint32_t tokens = rest < GROUP_TOKENS ? rest : GROUP_TOKENS;
            const uint32_t tiles = (tokens + SHADOW_TILE_TOKENS - 1) / SHADOW_TILE_TOKENS;
            const uint32_t beats = tiles * TOKEN_SLICES;
            const uint64_t tile_place = exponent_place + KV_HEADS;
        write_tile_beats:
            // recurrence: none
            // access: linear
            for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
                shadow[tile_place + b] = tile_beats.read();
            }
        write_exponent_beats:
            // recurrence: none
            // access: linear
            for (int b = 0; b < KV_HEADS; ++b) {
#pragma HLS PIPELINE II=1
                shadow[exponent_place + b] = exponent_beats.read();
            }
            exponent_place += GROUP_BEATS;
            done += tokens;
            if (done < c.tokens && done - counted >= uint32_t(BLOCK_TOKENS)) {
                counted = done;
                status[segment] = status_beat(launch_id, done, ERROR_NONE);
            }
        }
        status[segment] = status_beat(launch_id, c.tokens, ERROR_NONE);
        ++segment;
        c = commands.read();
    }
    if (c.error != ERROR_NONE) status[segment] = status_beat(launch_id, 0, c.error);
}

}  // namespace hillinfer
