// SPDX-License-Identifier: Apache-2.0
// Score codes and tuples, 16 to a beat (scoring contract, sections 7 and 11).
#pragma once

#include "commands.h"
#include "rules.h"

namespace hillinfer {

struct CodeWord {
    ap_uint<16> code[TILE_TOKENS];
};

// Score codes of a tile, as many a cycle as keep up with the totals.
inline void make_codes(hls::stream<WorkCommand> &commands, hls::stream<TotalWord> &totals,
                       hls::stream<CodeWord> &codes) {
    WorkCommand c;
    uint32_t left = 0;  // steps of the segment
    int part = 0;
    TotalWord coming;
    // The part chooses the places of a tile's tokens, so every one is a register.
    Total total[TILE_TOKENS];
    bool invalid[TILE_TOKENS];
    ap_uint<16> code[TILE_TOKENS];
#pragma HLS ARRAY_PARTITION variable=total complete dim=0
#pragma HLS ARRAY_PARTITION variable=invalid complete dim=0
#pragma HLS ARRAY_PARTITION variable=code complete dim=0
    bool open = true;
code_rounds:
    // recurrence: the word being filled, one register per field; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
            }
        } else {
            bool here = true;
            if (part == 0) here = totals.read_nb(coming);
            if (here) {
                for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                    if (part == 0) {
                        total[i] = coming.total[i];
                        invalid[i] = coming.invalid[i];
                    }
                }
                for (int u = 0; u < CODE_TOKENS; ++u) {
#pragma HLS UNROLL
                    const int i = part * CODE_TOKENS + u;
                    // 0 ranks last: a NaN lies among the token's keys.
                    code[i] = invalid[i] ? ap_uint<16>(0) : ScoreUnit::code(total[i]);
                }
                CodeWord out;
                for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                    out.code[i] = code[i];
                }
                if (part == CODE_PARTS - 1) codes.write(out);
                part = part == CODE_PARTS - 1 ? 0 : part + 1;
                --left;
            }
        }
    }
}

// Joins codes with positions. In scope `kv_head` the KV heads of a tile follow each other, so the
// beat of each KV head is filled over several tiles.
inline void join_tuples(uint32_t scope, hls::stream<WorkCommand> &commands,
                        hls::stream<CodeWord> &codes, hls::stream<Beat> &score_beats) {
    constexpr int BEAT_TILES = TUPLES_PER_BEAT / TILE_TOKENS;
    const uint32_t arrays = set_arrays(scope);
    ap_uint<16 * TUPLES_PER_BEAT> partial[KV_HEADS];
    WorkCommand c;
    uint32_t left = 0;  // words of the segment
    uint32_t tile = 0;
    uint32_t array = 0;
    bool open = true;
join_rounds:
    // recurrence: the codes gathered for a KV head, one shift; distance 1 in scope layer
    // A word comes once per HEAD_CYCLES (2 or more) cycles at most, so an II of 2 is enough.
    while (open) {
#pragma HLS PIPELINE II=2 style=stp
        CodeWord word;
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
                tile = 0;
            }
        } else if (codes.read_nb(word)) {
            const int place = tile % BEAT_TILES;
            // Codes enter at the top, so that after BEAT_TILES words the first token is lowest.
            ap_uint<16 * TUPLES_PER_BEAT> gathered =
                place == 0 ? ap_uint<16 * TUPLES_PER_BEAT>(0) : partial[array];
            for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                gathered >>= 16;
                gathered.range(16 * TUPLES_PER_BEAT - 1, 16 * TUPLES_PER_BEAT - 16) = word.code[i];
            }
            partial[array] = gathered;
            const bool last_tile = left <= arrays;
            if (place == BEAT_TILES - 1 || last_tile) {
                const ap_uint<9> missing = 16 * TILE_TOKENS * (BEAT_TILES - 1 - place);
                const ap_uint<16 * TUPLES_PER_BEAT> in_place = gathered >> missing;
                const uint32_t first = (tile - place) * TILE_TOKENS;
                Beat beat;
                for (int i = 0; i < TUPLES_PER_BEAT; ++i) {
#pragma HLS UNROLL
                    // Segments never cross a window of 65,536 positions: 16 bits do not overflow.
                    const ap_uint<16> position = c.position + ap_uint<16>(first + i);
                    const ap_uint<16> code = in_place.range(16 * i + 15, 16 * i);
                    const bool counted = first + i < c.tokens;
                    beat.range(32 * i + 31, 32 * i + 16) = counted ? code : ap_uint<16>(0);
                    beat.range(32 * i + 15, 32 * i) = counted ? position : ap_uint<16>(0);
                }
                score_beats.write(beat);
            }
            if (array == arrays - 1) ++tile;
            array = array == arrays - 1 ? 0 : array + 1;
            --left;
        }
    }
}

}  // namespace hillinfer
