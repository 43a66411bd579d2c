// SPDX-License-Identifier: Apache-2.0
// Regroups a query block into the words that `dot` and `score` read (scoring contract, section 6).
#pragma once

#include "commands.h"

namespace hillinfer {

inline void order_queries(hls::stream<WorkCommand> &commands, hls::stream<Beat> &block_beats,
                          hls::stream<HeadWord> &heads, hls::stream<QueryWord> &queries) {
    WorkCommand c = commands.read();
order_segments:
    // recurrence: none
    while (!c.end) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        Beat addends[ADDEND_BEATS];
        Beat exponents[EXPONENT_BEATS];
    order_addends:
        // recurrence: none
        for (int b = 0; b < ADDEND_BEATS; ++b) {
#pragma HLS PIPELINE II=1
            addends[b] = block_beats.read();
        }
    order_exponents:
        // recurrence: none
        for (int b = 0; b < EXPONENT_BEATS; ++b) {
#pragma HLS PIPELINE II=1
            exponents[b] = block_beats.read();
        }
        HeadWord head;
        int group_head = 0;
    order_heads:
        // recurrence: the word being filled, one register per field; distance 1
        for (int h = 0; h < SCORED_HEADS; ++h) {
#pragma HLS PIPELINE II=1
            const int a = 32 * (h % 16);
            const int e = 8 * (h % 64);
            head.addend[group_head] = addends[h / 16].range(a + 31, a);
            head.exponent[group_head] = exponents[h / 64].range(e + 7, e);
            if (group_head == GROUP_HEADS - 1) heads.write(head);
            group_head = group_head == GROUP_HEADS - 1 ? 0 : group_head + 1;
        }
        Beat beat = 0;
        QueryWord word;
        group_head = 0;
    order_codes:
        // recurrence: the word being filled, one register per field; distance 1
        for (int n = 0; n < TOKEN_SLICES * GROUP_HEADS; ++n) {
#pragma HLS PIPELINE II=1
            if (n % 4 == 0) beat = block_beats.read();
            for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                word.code[group_head][j] = beat.range(8 * j + 7, 8 * j);
            }
            beat >>= 8 * SLICE_CHANNELS;
            if (group_head == GROUP_HEADS - 1) queries.write(word);
            group_head = group_head == GROUP_HEADS - 1 ? 0 : group_head + 1;
        }
        c = commands.read();
    }
}

}  // namespace hillinfer
