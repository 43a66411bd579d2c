// SPDX-License-Identifier: Apache-2.0
// Says of every beat of FP16 rows (two slices of 16 channels, low and high) which KV head and
// token it holds. With an odd number of slices a beat may hold two heads.
module row_sequencer #(
    parameter int SLICES = 8,
    parameter int KV = 8,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1,
    parameter int WORD_BITS = $clog2(KV * SLICES)
) (
    input  logic                 clk,
    input  logic                 rst,
    input  logic                 next_valid,
    output logic                 next_ready,
    input  logic [         16:0] next_tokens,
    input  logic [         11:0] next_row,
    input  logic                 next_slot,
    output logic                 active,
    input  logic                 accept,
    // of the beat at hand
    output logic                 first,         // the low slice opens its head
    output logic                 last,          // the low slice's head ends here
    output logic                 split,         // the high slice is not of the low slice's head
    output logic                 spare,         // the high slice is of no head
    output logic [HEAD_BITS-1:0] head,          // of the low slice
    output logic [WORD_BITS-1:0] word,          // of the low slice, within the row
    output logic                 slot,
    output logic [         15:0] token,
    output logic                 row_start,
    output logic                 row_done,      // the token's last beat
    output logic                 segment_end,   // the segment's last token
    output logic [         11:0] position_row,  // position / 16
    output logic [          3:0] row_last
);
  localparam int BEATS = (KV * SLICES + 1) / 2;
  localparam int SB = $clog2(SLICES + 1);
  logic [SB-1:0] slice;
  logic [16:0] left;

  assign first = slice == 0;
  assign split = SLICES % 2 == 1 && 32'(slice) == SLICES - 1;
  assign last = split || 32'(slice) == SLICES - 2;
  assign row_start = word == 0;
  assign row_done = 32'(word) == 2 * (BEATS - 1);
  assign spare = row_done && split;
  assign next_ready = !active || (accept && row_done && segment_end);

  always_ff @(posedge clk) begin
    if (next_ready && next_valid) begin
      left <= next_tokens;
      segment_end <= next_tokens == 1;
      position_row <= next_row;
      row_last <= next_tokens[3:0] - 4'd1;
      slot <= next_slot;
      token <= '0;
    end else if (accept && row_done) begin
      left <= left - 1'b1;
      segment_end <= left == 2;
      token <= token + 1'b1;
      if (&token[3:0]) position_row <= position_row + 1'b1;
    end
    if (rst) begin
      active <= 1'b0;
      slice <= '0;
      word <= '0;
      head <= '0;
    end else begin
      if (next_ready) active <= next_valid;
      if (accept) begin
        if (row_done || (last && !split)) slice <= '0;
        else if (split) slice <= SB'(1);
        else slice <= slice + SB'(2);
        word <= row_done ? '0 : word + WORD_BITS'(2);
        if (row_done) head <= '0;
        else if (last) head <= head + 1'b1;
      end
    end
  end
endmodule
