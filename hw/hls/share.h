// SPDX-License-Identifier: Apache-2.0
// Several queries in one pass over the keys (scoring contract, section 17).
//
// Every query has its own processes from its query block to its tuples, and they are the same ones
// as for one query. The queries form a chain: each hands on to the next what is for it, commands
// and key codes once for each query, so that no stream fans out to all of them. On the way back
// each puts its own beats of 16 tokens before those of the queries behind it.
#pragma once

#include "commands.h"

namespace hillinfer {

// Queries behind one of the chain that the launch has.
inline uint32_t queries_behind(uint32_t scope, uint32_t index) {
#pragma HLS INLINE
    const uint32_t further = further_queries(scope);
    return further > index ? further - index : 0;
}

inline void share_commands(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                           hls::stream<WorkCommand> &own, hls::stream<WorkCommand> &next) {
    const uint32_t behind = queries_behind(scope, index);
    bool open = true;
share_command_rounds:
    // recurrence: none
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        if (commands.read_nb(c)) {
            open = !c.end;
            own.write(c);
            if (c.end || behind != 0) next.write(c);
        }
    }
}

// Those of tuples go to who merges them, too.
inline void share_joins(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                        hls::stream<WorkCommand> &own, hls::stream<WorkCommand> &next,
                        hls::stream<WorkCommand> &merge) {
    const uint32_t behind = queries_behind(scope, index);
    bool open = true;
share_join_rounds:
    // recurrence: none
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        if (commands.read_nb(c)) {
            open = !c.end;
            own.write(c);
            merge.write(c);
            if (c.end || behind != 0) next.write(c);
        }
    }
}

// The first query block is the own one.
inline void share_blocks(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                         hls::stream<Beat> &beats, hls::stream<WorkCommand> &own_commands,
                         hls::stream<Beat> &own_beats, hls::stream<WorkCommand> &next_commands,
                         hls::stream<Beat> &next_beats) {
    const uint32_t behind = queries_behind(scope, index);
    const uint32_t all = QUERY_BLOCK_BEATS * (1 + behind);
    uint32_t left = 0;  // beats of the segment
    uint32_t place = 0;
    bool open = true;
share_block_rounds:
    // recurrence: beats left and place within the blocks, one increment; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        Beat beat;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.end ? 0 : all;
                place = 0;
                own_commands.write(c);
                if (c.end || behind != 0) next_commands.write(c);
            }
        } else if (beats.read_nb(beat)) {
            if (place < uint32_t(QUERY_BLOCK_BEATS)) {
                own_beats.write(beat);
            } else {
                next_beats.write(beat);
            }
            ++place;
            --left;
        }
    }
}

// Key codes: as many words as `dot` has rounds.
template <typename Word>
inline void share_codes(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                        hls::stream<Word> &words, hls::stream<WorkCommand> &own_commands,
                        hls::stream<Word> &own_words, hls::stream<WorkCommand> &next_commands,
                        hls::stream<Word> &next_words) {
    const uint32_t behind = queries_behind(scope, index);
    uint32_t left = 0;  // words of the segment
    bool open = true;
share_code_rounds:
    // recurrence: words left, one increment; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        Word word;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
                own_commands.write(c);
                if (c.end || behind != 0) next_commands.write(c);
            }
        } else if (words.read_nb(word)) {
            own_words.write(word);
            if (behind != 0) next_words.write(word);
            --left;
        }
    }
}

// Token exponents: one word per KV head of a tile, while `score` has several rounds for it.
inline void share_exponents(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                            hls::stream<ExponentWord> &words,
                            hls::stream<WorkCommand> &own_commands,
                            hls::stream<ExponentWord> &own_words,
                            hls::stream<WorkCommand> &next_commands,
                            hls::stream<ExponentWord> &next_words) {
    const uint32_t behind = queries_behind(scope, index);
    uint32_t left = 0;  // words of the segment
    bool open = true;
share_exponent_rounds:
    // recurrence: words left, one increment; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        ExponentWord word;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = (c.tokens + TILE_TOKENS - 1) / TILE_TOKENS * KV_HEADS;
                own_commands.write(c);
                if (c.end || behind != 0) next_commands.write(c);
            }
        } else if (words.read_nb(word)) {
            own_words.write(word);
            if (behind != 0) next_words.write(word);
            --left;
        }
    }
}

// Of every 16 tokens the own beats, then those of the queries behind.
inline void merge_scores(uint32_t index, uint32_t scope, hls::stream<WorkCommand> &commands,
                         hls::stream<Beat> &own_beats, hls::stream<Beat> &next_beats,
                         hls::stream<Beat> &score_beats) {
    const uint32_t own = set_arrays(scope);
    const uint32_t all = own * (1 + queries_behind(scope, index));
    uint32_t left = 0;  // times 16 tokens of the segment
    uint32_t place = 0;
    bool open = true;
merge_rounds:
    // recurrence: place within 16 tokens' beats, one increment; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        WorkCommand c;
        Beat beat;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = (c.tokens + TUPLES_PER_BEAT - 1) / TUPLES_PER_BEAT;
                place = 0;
            }
        } else {
            bool here = false;
            if (place < own) {
                here = own_beats.read_nb(beat);
            } else {
                here = next_beats.read_nb(beat);
            }
            if (here) {
                score_beats.write(beat);
                const bool ends = place == all - 1;
                place = ends ? 0 : place + 1;
                if (ends) --left;
            }
        }
    }
}

}  // namespace hillinfer
