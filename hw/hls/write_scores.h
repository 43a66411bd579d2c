// SPDX-License-Identifier: Apache-2.0
// Last process of `score_tokens`: score blocks and status beats (bundle gmem2).
//
// Scores and status share a bundle and a process on purpose. A write loop ends with its write
// responses (the tool places the `writeresp` of a burst behind the loop), and the status write
// comes after the loop in program order on the same port. So whoever reads a count finds every
// tuple it counts in memory. On two bundles nothing would keep that order. That is also why this
// process is no flat loop: it has to drain before each status beat. Score beats of the next block
// wait in their FIFO meanwhile, and there is one of them for many key beats.
#pragma once

#include "status.h"

namespace hillinfer {

inline void write_scores(uint32_t scope, uint32_t launch_id, hls::stream<WriteCommand> &commands,
                         hls::stream<Beat> &score_beats, Beat *scores, Beat *status) {
    constexpr uint32_t BLOCK_BEATS = BLOCK_TOKENS / TUPLES_PER_BEAT;
    const uint32_t arrays = score_arrays(scope);
    uint32_t segment = 0;
    WriteCommand c = commands.read();
write_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t beats = (c.tokens + TUPLES_PER_BEAT - 1) / TUPLES_PER_BEAT;
        uint32_t done = 0;
    write_blocks:
        // recurrence: beats written so far, one addition; distance 1
        // A segment without tokens has one round, which writes its status.
        do {
#pragma HLS LOOP_TRIPCOUNT min=1 max=64
            const uint32_t rest = beats - done;
            const uint32_t block = rest < BLOCK_BEATS ? rest : BLOCK_BEATS;
            const uint64_t start = c.target + done;
            if (arrays != 1) {
                // 16 tokens of each query and KV head in turn, into arrays far apart.
                const uint32_t block_beats = block * arrays;
                uint64_t place = start;
                uint64_t next_start = start + 1;
                uint32_t array = 0;
            write_array_beats:
                // recurrence: place in the score arrays, one 64-bit addition; distance 1
                // access: scattered, one write transaction per beat
                for (uint32_t b = 0; b < block_beats; ++b) {
#pragma HLS PIPELINE II=1
                    scores[place] = score_beats.read();
                    const bool last_array = array == arrays - 1;
                    place = last_array ? next_start : place + c.stride;
                    if (last_array) ++next_start;
                    array = last_array ? 0 : array + 1;
                }
            } else {
            write_block_beats:
                // recurrence: none
                // access: linear
                for (uint32_t b = 0; b < block; ++b) {
#pragma HLS PIPELINE II=1
                    scores[start + b] = score_beats.read();
                }
            }
            done += block;
            const uint32_t tokens = done == beats ? c.tokens : done * TUPLES_PER_BEAT;
            status[segment] = status_beat(launch_id, tokens, ERROR_NONE);
        } while (done < beats);
        ++segment;
        c = commands.read();
    }
    if (c.error != ERROR_NONE) status[segment] = status_beat(launch_id, 0, c.error);
}

}  // namespace hillinfer
