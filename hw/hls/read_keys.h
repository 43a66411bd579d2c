// SPDX-License-Identifier: Apache-2.0
// Reads key beats (bundle gmem0), a segment ahead of the arithmetic as far as its FIFO holds.
//
// Indices are linear in the loop counter, so bursts can be inferred; the adapter cuts them at 64
// beats, which on a 512-bit bus is the 4 KiB that an AXI4 burst must not cross.
#pragma once

#include "commands.h"

namespace hillinfer {

// A shadow is one linear range per segment: exponents never break a burst.
inline void read_shadow(const Beat *shadow, hls::stream<ReadCommand> &commands,
                        hls::stream<Beat> &keys) {
    ReadCommand c = commands.read();
read_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const uint32_t beats = shadow_beats(c.tokens);
    read_shadow_beats:
        // recurrence: none
        for (uint32_t b = 0; b < beats; ++b) {
#pragma HLS PIPELINE II=1
            keys.write(shadow[c.source + b]);
        }
        c = commands.read();
    }
}

// The keys of every row; rows without a gap between them are one linear range.
inline void read_rows(const Beat *rows, hls::stream<ReadCommand> &commands,
                      hls::stream<Beat> &keys) {
    ReadCommand c = commands.read();
read_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const bool dense = c.stride == uint32_t(ROW_BEATS);
        const uint32_t runs = dense ? 1 : c.tokens;
        const uint32_t run_beats = dense ? c.tokens * ROW_BEATS : ROW_BEATS;
        uint64_t start = c.source;
    read_runs:
        // recurrence: start of the run, one 64-bit addition; distance 1
        for (uint32_t r = 0; r < runs; ++r) {
        read_row_beats:
            // recurrence: none
            for (uint32_t b = 0; b < run_beats; ++b) {
#pragma HLS PIPELINE II=1
                keys.write(rows[start + b]);
            }
            start += c.stride;
        }
        c = commands.read();
    }
}

}  // namespace hillinfer
