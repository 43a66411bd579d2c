// SPDX-License-Identifier: Apache-2.0
// Takes beats of one number per head apart: a beat is held while its numbers go one by one to the
// lane and word of their head.
module number_loader #(
    parameter int HEADS = 32,
    parameter int G = 4,
    parameter int LANE_HEADS = 4,
    parameter int STEPS = 1,
    parameter int WIDTH = 32,
    parameter int WORD_BITS = 3
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  in_valid,
    output logic                  in_ready,
    input  logic [         511:0] in_data,
    output logic                  done,    // nothing left of the segment's beats so far
    output logic [LANE_HEADS-1:0] write,
    output logic [ WORD_BITS-1:0] word,
    output logic [     WIDTH-1:0] number
);
  localparam int PER_BEAT = 512 / WIDTH;
  localparam int HELD = (HEADS < PER_BEAT) ? HEADS : PER_BEAT;
  localparam int HB = $clog2(HEADS + 1);
  localparam int IB = (HELD > 1) ? $clog2(HELD) : 1;
  localparam int LB = (LANE_HEADS > 1) ? $clog2(LANE_HEADS) : 1;
  logic [HELD*WIDTH-1:0] held;
  logic busy, last_of_beat, last_head, last_of_group;
  logic [IB-1:0] index;
  logic [HB-1:0] heads_left;
  logic [LB-1:0] lane;
  logic [$clog2(G+1)-1:0] head;

  assign last_of_group = 32'(head) == G - 1;
  assign in_ready = !busy || last_of_beat;
  assign done = !busy;
  assign number = held[index*WIDTH+:WIDTH];
  always_comb begin
    write = '0;
    write[lane] = busy;
  end

  always_ff @(posedge clk) begin
    if (in_valid && in_ready) held <= in_data[HELD*WIDTH-1:0];
    if (rst) begin
      busy <= 1'b0;
      index <= '0;
      last_of_beat <= HELD == 1;
      heads_left <= HB'(HEADS);
      last_head <= HEADS == 1;
      lane <= '0;
      head <= '0;
      word <= '0;
    end else begin
      if (in_valid && in_ready) busy <= 1'b1;
      else if (last_of_beat) busy <= 1'b0;
      if (busy) begin
        index <= last_of_beat ? '0 : index + 1'b1;
        last_of_beat <= (last_of_beat ? HELD == 1 : 32'(index) == HELD - 2)
            || (last_head ? HEADS == 1 : heads_left == 2);
        heads_left <= last_head ? HB'(HEADS) : heads_left - 1'b1;
        last_head <= last_head ? HEADS == 1 : heads_left == 2;
        head <= last_of_group ? '0 : head + 1'b1;
        if (last_of_group) begin
          lane <= '0;
          // A KV head always takes STEPS words, also where its last ones hold no head.
          word <= last_head ? '0 : word + WORD_BITS'(STEPS - (G - 1) / LANE_HEADS);
        end else if (32'(lane) == LANE_HEADS - 1) begin
          lane <= '0;
          word <= word + 1'b1;
        end else begin
          lane <= lane + 1'b1;
        end
      end
    end
  end
endmodule
