// SPDX-License-Identifier: Apache-2.0
// Datapath of make_shadow: FP16 rows and channel statistics in, shadow beats out.
module shadow_core #(
    parameter int HEAD_DIM = 128,
    parameter int KV = 8,
    parameter int CODE_BITS = 4,
    parameter int SEGMENT_TOKENS = 1024
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         load_valid,
    output logic         load_ready,
    input  logic [511:0] load_data,
    input  logic         seg_valid,
    output logic         seg_ready,
    input  logic [ 16:0] seg_tokens,
    input  logic         key_valid,
    output logic         key_ready,
    input  logic [511:0] key_data,
    output logic         out_valid,
    input  logic         out_ready,
    output logic [511:0] out_data,
    output logic [ 31:0] out_beat,
    output logic         out_last
);
endmodule
