// SPDX-License-Identifier: Apache-2.0
// Says of every key beat of a shadow what it holds: exponents of a group, or the codes of one
// (tile, KV head, slice). Accepts a beat only with a credit for the tuples it may complete.
module tile_sequencer #(
    parameter int SLICES = 8,
    parameter int KV = 8,
    parameter int TILE_TOKENS = 8,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1,
    parameter int WORD_BITS = $clog2(KV * SLICES)
) (
    input  logic                 clk,
    input  logic                 rst,
    input  logic                 kv_head_scope,
    input  logic                 next_valid,
    output logic                 next_ready,
    input  logic [         16:0] next_tokens,
    input  logic [         11:0] next_row,
    input  logic                 next_slot,
    input  logic                 key_valid,
    output logic                 key_ready,
    input  logic                 credit_available,
    output logic                 take_credit,
    // of the beat accepted in this cycle
    output logic                 exponents,
    output logic                 codes,
    output logic [          2:0] bank,          // of the exponent buffer
    output logic [HEAD_BITS-1:0] head,
    output logic                 first_slice,
    output logic                 last_slice,
    output logic [WORD_BITS-1:0] word,          // (KV head, slice)
    output logic                 slot,
    output logic [          5:0] tile_token,    // of the tile's first token, within its group
    output logic [         11:0] row,           // of 16 positions
    output logic                 row_end,       // last tile of its 16 positions or of the segment
    output logic                 segment_end,   // last tile of the segment
    output logic [          3:0] row_last       // tokens in the segment's last row, less 1
);
  localparam int SB = $clog2(SLICES);
  logic active, in_exponents, accept, last_head, end_of_tile, end_of_segment, last_tile;
  logic [SB-1:0] slice;
  logic [16:0] left;  // tokens from this tile on

  assign key_ready = active && credit_available;
  assign accept = key_valid && key_ready;
  assign exponents = accept && in_exponents;
  assign codes = accept && !in_exponents;
  assign first_slice = slice == 0;
  assign end_of_tile = codes && last_slice && last_head;
  assign end_of_segment = end_of_tile && last_tile;
  assign next_ready = end_of_segment || !active;
  assign segment_end = last_tile;
  assign row_end = last_tile || ((32'(tile_token) + TILE_TOKENS) & 15) == 0;
  assign take_credit = codes && last_slice && row_end && (kv_head_scope || last_head);

  always_ff @(posedge clk) begin
    if (next_ready && next_valid) begin
      left <= next_tokens;
      last_tile <= 32'(next_tokens) <= TILE_TOKENS;
      row <= next_row;
      row_last <= next_tokens[3:0] - 4'd1;
      slot <= next_slot;
    end else if (end_of_tile) begin
      left <= left - 17'(TILE_TOKENS);
      last_tile <= 32'(left) <= 2 * TILE_TOKENS;
      if (row_end) row <= row + 1'b1;
    end
    if (rst) begin
      active <= 1'b0;
      in_exponents <= 1'b1;
      bank <= 3'd0;
      head <= '0;
      last_head <= KV == 1;
      slice <= '0;
      last_slice <= SLICES == 1;
      word <= '0;
      tile_token <= '0;
    end else begin
      if (next_ready) active <= next_valid;
      if (exponents || (codes && last_slice)) begin
        head <= last_head ? '0 : head + 1'b1;
        last_head <= KV == 1 || 32'(head) == KV - 2;
      end
      if (exponents) begin
        if (last_head) in_exponents <= 1'b0;
      end
      if (codes) begin
        slice <= last_slice ? '0 : slice + 1'b1;
        last_slice <= SLICES == 1 || 32'(slice) == SLICES - 2;
        word <= (last_slice && last_head) ? '0 : word + 1'b1;
        if (end_of_tile) begin
          tile_token <= last_tile ? '0 : tile_token + 6'(TILE_TOKENS);
          if (last_tile || 32'(tile_token) == 64 - TILE_TOKENS) begin
            in_exponents <= 1'b1;
            bank <= bank + 3'd1;
          end
        end
      end
    end
  end
endmodule
