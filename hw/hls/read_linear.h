// SPDX-License-Identifier: Apache-2.0
// Reads key beats (bundle gmem0) in plain loops, in place of read_keys.h.
//
// A burst is inferred from each loop, as from any other linear one, and is requested when the loop
// starts. So a segment costs one latency of the memory more than where bursts are requested ahead,
// and rows with gaps between them one latency each. For a tool that does not take requests and
// beats of `burst_maxi` in one loop.
#pragma once

#include "commands.h"

namespace hillinfer {

inline void read_linear(const Beat *memory, hls::stream<ReadCommand> &commands,
                        hls::stream<Beat> &keys) {
    ReadCommand c = commands.read();
read_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t beats = uint32_t(c.last - c.first) + 1;
        uint64_t first = c.first;
    read_runs:
        // recurrence: place of the run, one 64-bit addition; distance 1
        for (uint32_t run = 0; run < c.runs; ++run) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=1024
        read_run_beats:
            // recurrence: none
            // access: linear
            for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
                keys.write(memory[first + b]);
            }
            first += c.stride;
        }
        c = commands.read();
    }
}

}  // namespace hillinfer
