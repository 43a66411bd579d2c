// SPDX-License-Identifier: Apache-2.0
// Datapath of make_shadow: FP16 rows and channel statistics in, shadow beats out, a group's tiles
// first and then its exponents. Takes a key beat per cycle.
module shadow_core #(
    parameter int HEAD_DIM = 128,  // padded: a multiple of 16 in 64..256
    parameter int KV = 8,
    parameter int CODE_BITS = 4,  // 8, 4 or 2
    parameter int SEGMENT_TOKENS = 1024
) (
    input  logic         clk,
    input  logic         rst,
    // per segment with tokens its statistics beats
    input  logic         load_valid,
    output logic         load_ready,
    input  logic [511:0] load_data,
    // the segments with tokens, in the order of their loads
    input  logic         seg_valid,
    output logic         seg_ready,
    input  logic [ 16:0] seg_tokens,
    // their rows
    input  logic         key_valid,
    output logic         key_ready,
    input  logic [511:0] key_data,
    // their shadows
    output logic         out_valid,
    input  logic         out_ready,
    output logic [511:0] out_data,
    output logic [ 31:0] out_beat,    // offset within the segment's shadow
    output logic         out_last     // last beat of the segment
);
  localparam int SLICES = HEAD_DIM / 16;
  localparam int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1;
  localparam int WORD_BITS = $clog2(KV * SLICES);

  logic loaded, write_slot, statistics_write, statistics_done;
  logic [WORD_BITS-1:0] statistics_word;
  logic unused_addend, unused_exponent, unused_codes;
  logic [HEAD_BITS-1:0] unused_addend_word, unused_exponent_word;
  logic [WORD_BITS-1:0] unused_word;
  logic [31:0] unused_value;
  logic [7:0] unused_byte;
  logic [127:0] unused_quarter;
  block_loader #(
      .SLICES(SLICES),
      .KV(KV),
      .G(1),
      .LANE_HEADS(1),
      .STEPS(1),
      .STATISTICS(1),
      .QUERIES(0)
  ) loader (
      .clk(clk),
      .rst(rst),
      .load_valid(load_valid),
      .load_ready(load_ready),
      .load_data(load_data),
      .release_slot(statistics_done),
      .loaded(loaded),
      .slot(write_slot),
      .statistics_write(statistics_write),
      .statistics_word(statistics_word),
      .addend_write(unused_addend),
      .addend_word(unused_addend_word),
      .addend(unused_value),
      .exponent_write(unused_exponent),
      .exponent_word(unused_exponent_word),
      .exponent(unused_byte),
      .code_write(unused_codes),
      .code_word(unused_word),
      .codes(unused_quarter)
  );

  logic next_valid, next_ready, next_slot;
  logic [16:0] next_tokens;
  logic [11:0] next_row;
  segment_queue queue (
      .clk(clk),
      .rst(rst),
      .loaded(loaded),
      .seg_valid(seg_valid),
      .seg_ready(seg_ready),
      .seg_tokens(seg_tokens),
      .seg_position(16'd0),
      .next_valid(next_valid),
      .next_ready(next_ready),
      .next_tokens(next_tokens),
      .next_row(next_row),
      .next_slot(next_slot)
  );

  logic room, beat, first, last, split, spare, slot, row_start, row_done, segment_end;
  logic [HEAD_BITS-1:0] head;
  logic [WORD_BITS-1:0] word;
  logic [15:0] token;
  logic [11:0] row;
  logic [3:0] row_last;
  logic [7:0] low_exponent;
  logic [32*CODE_BITS-1:0] codes;
  head_cast #(
      .SLICES(SLICES),
      .KV(KV),
      .CODE_BITS(CODE_BITS)
  ) cast_rows (
      .clk(clk),
      .rst(rst),
      .write_slot(write_slot),
      .statistics_write(statistics_write),
      .statistics_word(statistics_word),
      .statistics_data(load_data),
      .next_valid(next_valid),
      .next_ready(next_ready),
      .next_tokens(next_tokens),
      .next_row(next_row),
      .next_slot(next_slot),
      .key_valid(key_valid),
      .key_ready(key_ready),
      .key_data(key_data),
      .statistics_done(statistics_done),
      .room(room),
      .beat(beat),
      .first(first),
      .last(last),
      .split(split),
      .spare(spare),
      .head(head),
      .word(word),
      .slot(slot),
      .token(token),
      .row_start(row_start),
      .row_done(row_done),
      .segment_end(segment_end),
      .position_row(row),
      .row_last(row_last),
      .low_exponent(low_exponent),
      .codes(codes)
  );

  tile_pack #(
      .SLICES(SLICES),
      .KV(KV),
      .CODE_BITS(CODE_BITS)
  ) tiles (
      .clk(clk),
      .rst(rst),
      .room(room),
      .beat(beat),
      .last(last),
      .head(head),
      .word(word),
      .token(token[5:0]),
      .row_start(row_start),
      .row_done(row_done),
      .segment_end(segment_end),
      .exponent(low_exponent),
      .codes(codes),
      .out_valid(out_valid),
      .out_ready(out_ready),
      .out_data(out_data),
      .out_beat(out_beat),
      .out_last(out_last)
  );
endmodule
