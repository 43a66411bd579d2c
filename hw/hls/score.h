// SPDX-License-Identifier: Apache-2.0
// From inner products to score codes (scoring contract, sections 5 and 7).
#pragma once

#include "commands.h"
#include "rules.h"

namespace hillinfer {

// Adds the terms of the heads that share one selected set: all of the layer, or of each KV head.
inline void score_tiles(uint32_t scope, hls::stream<WorkCommand> &commands,
                        hls::stream<HeadWord> &heads, hls::stream<SumWord> &sums,
                        hls::stream<ExponentWord> &exponents, hls::stream<TotalWord> &totals) {
    HeadWord held[2][KV_HEADS];
#pragma HLS AGGREGATE variable=held
    // A round writes into the half that it does not read, and a round that changes halves lies
    // between the last write and the first read.
#pragma HLS DEPENDENCE variable=held type=intra dependent=false
#pragma HLS DEPENDENCE variable=held type=inter direction=RAW distance=2 dependent=true
    Total total[TILE_TOKENS];
    bool invalid[TILE_TOKENS];
#pragma HLS ARRAY_PARTITION variable=total complete dim=0
#pragma HLS ARRAY_PARTITION variable=invalid complete dim=0
    const bool per_kv_head = is_per_kv_head(scope);
    int slot = 0;    // half of `held` in use
    int loaded = 0;  // words of the next segment in the other half
    WorkCommand c;
    bool told = false;  // whether `c` waits for its heads
    uint32_t left = 0;  // steps of the segment
    int kv_head = 0;
    int head_step = 0;
    int part = 0;
    SumWord coming_sum;
    bool has_sum = false;  // whether `coming_sum` is that of the KV head that starts next
    ExponentWord coming_exponent;
    bool has_exponent = false;
    // Those of the KV head that is worked on. The step and the part choose their places, so every
    // one is a register.
    HeadSum sum[TILE_TOKENS][GROUP_HEADS];
    ap_uint<8> exponent[TILE_TOKENS];
    ap_int<32> addend[GROUP_HEADS];
    ap_int<8> query_exponent[GROUP_HEADS];
#pragma HLS ARRAY_PARTITION variable=sum complete dim=0
#pragma HLS ARRAY_PARTITION variable=exponent complete dim=0
#pragma HLS ARRAY_PARTITION variable=addend complete dim=0
#pragma HLS ARRAY_PARTITION variable=query_exponent complete dim=0
    bool open = true;
score_rounds:
    // recurrence: totals of a tile, one saturating addition of 52 bits; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        if (!has_sum) has_sum = sums.read_nb(coming_sum);
        if (!has_exponent) has_exponent = exponents.read_nb(coming_exponent);
        const bool first_step = head_step == 0 && part == 0;
        if (left == 0) {
            if (!told) told = commands.read_nb(c);
            if (told && (c.end || loaded == KV_HEADS)) {
                open = !c.end;
                left = c.rounds;
                told = false;
                slot = 1 - slot;
                loaded = 0;
            }
        } else if (!first_step || (has_sum && has_exponent)) {
            if (first_step) {
                const HeadWord head = held[slot][kv_head];
                for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                    addend[r] = head.addend[r];
                    query_exponent[r] = head.exponent[r];
                }
                for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                    exponent[i] = coming_exponent.exponent[i];
                    for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                        sum[i][r] = coming_sum.sum[i][r];
                    }
                }
                has_sum = false;
                has_exponent = false;
            }
            const bool starts_total = head_step == 0 && (per_kv_head || kv_head == 0);
            for (int u = 0; u < PART_TOKENS; ++u) {
#pragma HLS UNROLL
                const int i = part * PART_TOKENS + u;
                // The terms of a step do not depend on the total: they are summed beside it, and
                // one addition per cycle meets the total.
                StepSum terms = 0;
                for (int s = 0; s < HEADS_PER_STEP; ++s) {
#pragma HLS UNROLL
                    const int r = head_step * HEADS_PER_STEP + s;
                    if (r < GROUP_HEADS) {
                        const ap_int<24> aligned =
                            align(sum[i][r], query_exponent[r], exponent[i]);
                        const ap_int<33> log_weight = ap_int<33>(aligned) + addend[r];
                        terms += ScoreUnit::term(log_weight);
                    }
                }
                const Total before = starts_total ? Total(0) : total[i];
                total[i] = ScoreUnit::add(before, terms);
                const bool bad = exponent[i] == INVALID_EXPONENT;
                invalid[i] = bad || (!starts_total && invalid[i]);
            }
            const bool head_ends = head_step == HEAD_STEPS - 1 && part == TILE_PARTS - 1;
            const bool last_kv_head = kv_head == KV_HEADS - 1;
            if (head_ends && (per_kv_head || last_kv_head)) {
                TotalWord out;
                for (int i = 0; i < TILE_TOKENS; ++i) {
#pragma HLS UNROLL
                    out.total[i] = total[i];
                    out.invalid[i] = invalid[i];
                }
                totals.write(out);
            }
            const bool parts_end = part == TILE_PARTS - 1;
            part = parts_end ? 0 : part + 1;
            if (parts_end) head_step = head_step == HEAD_STEPS - 1 ? 0 : head_step + 1;
            if (head_ends) kv_head = last_kv_head ? 0 : kv_head + 1;
            --left;
        }
        HeadWord coming;
        if (loaded < KV_HEADS && heads.read_nb(coming)) {
            held[1 - slot][loaded] = coming;
            ++loaded;
        }
    }
}

}  // namespace hillinfer
