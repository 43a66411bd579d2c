// SPDX-License-Identifier: Apache-2.0
// First process: reads descriptors, statistics and query blocks (bundle gmem1) and commands the
// others. It runs ahead of them as far as the command and block FIFOs allow.
//
// It is no flat loop: each segment costs one latency of the memory for its descriptor and one per
// block, which the other processes do not see while the segments before it keep them busy.
//
// A wrong descriptor ends the launch: the segments before it complete, the writer puts the error
// into its status beat, and nothing of it or behind it is read or written. Responses of the bus are
// not visible behind a pointer in C++, so error 2 (bus) can only come from the RTL.
#pragma once

#include "descriptor.h"

namespace hillinfer {

inline WorkCommand work_command(const Descriptor &d, uint32_t rounds) {
#pragma HLS INLINE
    const WorkCommand command = {false, rounds, d.tokens, ap_uint<16>(d.base_position)};
    return command;
}

// A shadow is one run of beats per segment: exponents never break a burst.
inline ReadCommand shadow_command(const Descriptor &d) {
#pragma HLS INLINE
    const uint64_t last = d.shadow + shadow_beats(d.tokens) - 1;
    const ReadCommand command = {false, d.shadow, last, 1, 0};
    return command;
}

// Rows are a run each; without gaps between them they are one run together.
inline ReadCommand rows_command(uint64_t source, uint32_t tokens, uint32_t stride) {
#pragma HLS INLINE
    const bool dense = stride == uint32_t(ROW_BEATS);
    const uint32_t run_beats = dense ? tokens * ROW_BEATS : uint32_t(ROW_BEATS);
    const ReadCommand command = {false, source, source + run_beats - 1, dense ? 1 : tokens, stride};
    return command;
}

// `score_tokens` over a shadow.
inline void fetch_shadow_segments(const Beat *segments, const Beat *queries, uint32_t segment_count,
                                  uint32_t scope, hls::stream<ReadCommand> &to_read,
                                  hls::stream<WorkCommand> &to_order,
                                  hls::stream<WorkCommand> &to_split,
                                  hls::stream<WorkCommand> &to_spread,
                                  hls::stream<WorkCommand> &to_dot,
                                  hls::stream<WorkCommand> &to_score,
                                  hls::stream<WorkCommand> &to_code,
                                  hls::stream<WorkCommand> &to_join,
                                  hls::stream<WriteCommand> &to_write,
                                  hls::stream<Beat> &block_beats) {
    const uint32_t arrays = set_arrays(scope);
    const uint32_t block_beats_each = QUERY_BLOCK_BEATS * (1 + further_queries(scope));
    LaunchError error = ERROR_NONE;
fetch_segments:
    // recurrence: the error found so far; distance 1
    for (uint32_t i = 0; i < segment_count && error == ERROR_NONE; ++i) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const Descriptor d = unpack_descriptor(segments[i]);
        error = check_score_descriptor(d, scope);
        if (error == ERROR_NONE) {
            const uint32_t tiles = (d.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
            const WriteCommand write = {false, ERROR_NONE, d.score, d.tokens, d.score_stride};
            to_write.write(write);
            if (d.tokens != 0) {
                to_read.write(shadow_command(d));
                to_order.write(work_command(d, ORDER_ROUNDS));
                to_split.write(work_command(d, shadow_beats(d.tokens)));
                to_spread.write(work_command(d, tiles * KV_HEADS));
                to_dot.write(work_command(d, tiles * TOKEN_SLICES));
                to_score.write(work_command(d, tiles * TILE_STEPS));
                to_code.write(work_command(d, tiles * arrays * CODE_PARTS));
                to_join.write(work_command(d, tiles * arrays));
            fetch_query_block:
                // recurrence: none
                // access: linear
                for (uint32_t b = 0; b < block_beats_each; ++b) {
#pragma HLS PIPELINE II=1
                    block_beats.write(queries[d.query + b]);
                }
            }
        }
    }
    const ReadCommand read_end = {true, 0, 0, 0, 0};
    const WorkCommand work_end = {true, 0, 0, 0};
    const WriteCommand write_end = {true, error, 0, 0, 0};
    to_write.write(write_end);
    to_read.write(read_end);
    to_order.write(work_end);
    to_split.write(work_end);
    to_spread.write(work_end);
    to_dot.write(work_end);
    to_score.write(work_end);
    to_code.write(work_end);
    to_join.write(work_end);
}

// `score_tokens` over rows: a statistics block goes before each query block.
inline void fetch_row_segments(const Beat *segments, const Beat *statistics, const Beat *queries,
                               uint32_t segment_count, uint32_t scope,
                               hls::stream<ReadCommand> &to_read,
                               hls::stream<WorkCommand> &to_order,
                               hls::stream<WorkCommand> &to_centre,
                               hls::stream<WorkCommand> &to_round,
                               hls::stream<WorkCommand> &to_dot,
                               hls::stream<WorkCommand> &to_score,
                               hls::stream<WorkCommand> &to_code,
                               hls::stream<WorkCommand> &to_join,
                               hls::stream<WriteCommand> &to_write,
                               hls::stream<Beat> &statistics_beats,
                               hls::stream<Beat> &block_beats) {
    const uint32_t arrays = set_arrays(scope);
    const uint32_t block_beats_each = QUERY_BLOCK_BEATS * (1 + further_queries(scope));
    LaunchError error = ERROR_NONE;
fetch_segments:
    // recurrence: the error found so far; distance 1
    for (uint32_t i = 0; i < segment_count && error == ERROR_NONE; ++i) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const Descriptor d = unpack_descriptor(segments[i]);
        error = check_score_descriptor(d, scope);
        if (error == ERROR_NONE) {
            const WriteCommand write = {false, ERROR_NONE, d.score, d.tokens, d.score_stride};
            to_write.write(write);
            if (d.tokens != 0) {
                to_read.write(rows_command(d.shadow, d.tokens, d.row_stride));
                to_order.write(work_command(d, ORDER_ROUNDS));
                to_centre.write(work_command(d, d.tokens * ROW_BEATS));
                to_round.write(work_command(d, d.tokens * ROW_BEATS));
                to_dot.write(work_command(d, d.tokens * ROW_BEATS));
                to_score.write(work_command(d, d.tokens * TILE_STEPS));
                to_code.write(work_command(d, d.tokens * arrays * CODE_PARTS));
                to_join.write(work_command(d, d.tokens * arrays));
            fetch_statistics:
                // recurrence: none
                // access: linear
                for (int b = 0; b < STATISTICS_BEATS; ++b) {
#pragma HLS PIPELINE II=1
                    statistics_beats.write(statistics[d.statistics + b]);
                }
            fetch_query_block:
                // recurrence: none
                // access: linear
                for (uint32_t b = 0; b < block_beats_each; ++b) {
#pragma HLS PIPELINE II=1
                    block_beats.write(queries[d.query + b]);
                }
            }
        }
    }
    const ReadCommand read_end = {true, 0, 0, 0, 0};
    const WorkCommand work_end = {true, 0, 0, 0};
    const WriteCommand write_end = {true, error, 0, 0, 0};
    to_write.write(write_end);
    to_read.write(read_end);
    to_order.write(work_end);
    to_centre.write(work_end);
    to_round.write(work_end);
    to_dot.write(work_end);
    to_score.write(work_end);
    to_code.write(work_end);
    to_join.write(work_end);
}

// `make_shadow`.
inline void fetch_source_rows(const Beat *segments, const Beat *statistics, uint32_t segment_count,
                              hls::stream<ReadCommand> &to_read,
                              hls::stream<WorkCommand> &to_centre,
                              hls::stream<WorkCommand> &to_round,
                              hls::stream<WorkCommand> &to_tiles,
                              hls::stream<WorkCommand> &to_gather,
                              hls::stream<WriteCommand> &to_write,
                              hls::stream<Beat> &statistics_beats) {
    LaunchError error = ERROR_NONE;
fetch_segments:
    // recurrence: the error found so far; distance 1
    for (uint32_t i = 0; i < segment_count && error == ERROR_NONE; ++i) {
#pragma HLS LOOP_TRIPCOUNT min=1 max=128
        const Descriptor d = unpack_descriptor(segments[i]);
        error = check_shadow_descriptor(d);
        if (error == ERROR_NONE) {
            const WriteCommand write = {false, ERROR_NONE, d.shadow, d.tokens, 0};
            to_write.write(write);
            if (d.tokens != 0) {
                // Rows to code are where `score_tokens` has its query block (contract, section 10).
                to_read.write(rows_command(d.query, d.tokens, d.row_stride));
                to_centre.write(work_command(d, d.tokens * ROW_BEATS));
                to_round.write(work_command(d, d.tokens * ROW_BEATS));
                to_tiles.write(work_command(d, d.tokens));
                to_gather.write(work_command(d, d.tokens * KV_HEADS));
            fetch_statistics:
                // recurrence: none
                // access: linear
                for (int b = 0; b < STATISTICS_BEATS; ++b) {
#pragma HLS PIPELINE II=1
                    statistics_beats.write(statistics[d.statistics + b]);
                }
            }
        }
    }
    const ReadCommand read_end = {true, 0, 0, 0, 0};
    const WorkCommand work_end = {true, 0, 0, 0};
    const WriteCommand write_end = {true, error, 0, 0, 0};
    to_write.write(write_end);
    to_read.write(read_end);
    to_centre.write(work_end);
    to_round.write(work_end);
    to_tiles.write(work_end);
    to_gather.write(work_end);
}

}  // namespace hillinfer
