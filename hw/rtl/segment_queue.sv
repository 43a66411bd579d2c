// SPDX-License-Identifier: Apache-2.0
// Commands of segments whose blocks are loaded, with the slot each one's blocks lie in.
module segment_queue (
    input  logic        clk,
    input  logic        rst,
    input  logic        loaded,        // a pulse per segment whose blocks lie in their slot
    input  logic        seg_valid,
    output logic        seg_ready,
    input  logic [16:0] seg_tokens,
    input  logic [15:0] seg_position,
    output logic        next_valid,
    input  logic        next_ready,
    output logic [16:0] next_tokens,
    output logic [11:0] next_row,      // position / 16; a segment starts at a multiple of 16
    output logic        next_slot
);
  logic [1:0] loads;
  logic held, held_slot;
  assign seg_ready = !held;
  assign next_valid = held && (loads != 0 || loaded);
  always_ff @(posedge clk) begin
    if (seg_valid && seg_ready) begin
      next_tokens <= seg_tokens;
      next_row <= seg_position[15:4];
    end
    if (rst) begin
      held <= 1'b0;
      held_slot <= 1'b0;
      loads <= '0;
    end else begin
      if (seg_ready) held <= seg_valid;
      else if (next_valid && next_ready) held <= 1'b0;
      if (next_valid && next_ready) held_slot <= ~held_slot;
      loads <= loads + {1'b0, loaded} - {1'b0, next_valid && next_ready};
    end
  end
  assign next_slot = held_slot;
endmodule
