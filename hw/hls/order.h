// SPDX-License-Identifier: Apache-2.0
// Regroups a query block into the words that `dot` and `score` read (scoring contract, section 10).
#pragma once

#include "commands.h"

namespace hillinfer {

inline void order_queries(hls::stream<WorkCommand> &commands, hls::stream<Beat> &block_beats,
                          hls::stream<HeadWord> &heads, hls::stream<QueryWord> &queries) {
    // What a round does: takes a beat of addends or of exponents, or fills one query head of a
    // word of either kind.
    enum Part { ADDENDS, EXPONENTS, HEADS, CODES };
    Beat addends[ADDEND_BEATS];
    Beat exponents[EXPONENT_BEATS];
    // The words being filled. Their places are chosen by `group_head`, so every one is a register.
    ap_int<32> head_addend[GROUP_HEADS];
    ap_int<8> head_exponent[GROUP_HEADS];
    QueryCode head_code[GROUP_HEADS][SLICE_CHANNELS];
#pragma HLS ARRAY_PARTITION variable=head_addend complete dim=0
#pragma HLS ARRAY_PARTITION variable=head_exponent complete dim=0
#pragma HLS ARRAY_PARTITION variable=head_code complete dim=0
    Beat codes = 0;
    WorkCommand c;
    uint32_t left = 0;  // rounds of the query block
    Part part = ADDENDS;
    int place = 0;  // within the part
    int group_head = 0;
    bool open = true;
order_rounds:
    // recurrence: place in the block, one increment; the words being filled; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
            }
        } else {
            Beat beat = codes;
            bool here = true;
            if (part != HEADS && (part != CODES || place % 4 == 0)) {
                here = block_beats.read_nb(beat);
            }
            if (here) {
                const bool word_ends = group_head == GROUP_HEADS - 1;
                bool part_ends = false;
                Part next = ADDENDS;
                if (part == ADDENDS) {
                    addends[place] = beat;
                    part_ends = place == ADDEND_BEATS - 1;
                    next = EXPONENTS;
                } else if (part == EXPONENTS) {
                    exponents[place] = beat;
                    part_ends = place == EXPONENT_BEATS - 1;
                    next = HEADS;
                } else if (part == HEADS) {
                    const int a = 32 * (place % 16);
                    const int e = 8 * (place % 64);
                    head_addend[group_head] = addends[place / 16].range(a + 31, a);
                    head_exponent[group_head] = exponents[place / 64].range(e + 7, e);
                    HeadWord head;
                    for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                        head.addend[r] = head_addend[r];
                        head.exponent[r] = head_exponent[r];
                    }
                    if (word_ends) heads.write(head);
                    group_head = word_ends ? 0 : group_head + 1;
                    part_ends = place == SCORED_HEADS - 1;
                    next = CODES;
                } else {
                    for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                        head_code[group_head][j] = beat.range(8 * j + 7, 8 * j);
                    }
                    codes = beat >> (8 * SLICE_CHANNELS);
                    QueryWord word;
                    for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                        for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                            word.code[r][j] = head_code[r][j];
                        }
                    }
                    if (word_ends) queries.write(word);
                    group_head = word_ends ? 0 : group_head + 1;
                    part_ends = place == CODE_ROUNDS - 1;
                }
                place = part_ends ? 0 : place + 1;
                if (part_ends) part = next;
                --left;
            }
        }
    }
}

}  // namespace hillinfer
