// SPDX-License-Identifier: Apache-2.0
// Datapath of score_tokens: key beats and query blocks in, beats of 16 tuples out.
module score_core #(
    parameter int HEAD_DIM = 128,  // padded: a multiple of 16 in 64..256
    parameter int KV = 8,
    parameter int G = 4,  // heads scored per KV head; 1 for raw_sum
    parameter int CODE_BITS = 4,  // 8, 4 or 2; 8 in key mode fp16
    parameter int MODE = 0,  // 0 shadow, 1 fp16 rows
    parameter int RULE = 1,  // 0 raw_sum, 1 weight_sum
    parameter int STYLE = 1,  // 0 dsp, 1 lut (bit planes)
    parameter int SEGMENT_TOKENS = 1024,
    parameter int BLOCK_TOKENS = 1024
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         load_valid,
    output logic         load_ready,
    input  logic [511:0] load_data,
    input  logic         seg_valid,
    output logic         seg_ready,
    input  logic [ 16:0] seg_tokens,
    input  logic [ 15:0] seg_position,
    input  logic         scope,         // 0 layer, 1 kv_head
    input  logic         key_valid,
    output logic         key_ready,
    input  logic [511:0] key_data,
    output logic         out_valid,
    input  logic         out_ready,
    output logic [511:0] out_data,
    output logic [  5:0] out_head,
    output logic         out_last
);
endmodule
