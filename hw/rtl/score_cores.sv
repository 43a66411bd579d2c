// SPDX-License-Identifier: Apache-2.0
// A datapath per query behind one reader of keys (contract, section 17): every key beat goes to all
// queries, query blocks to one after the other, and of each 16 tokens the beats of
// tuples come query by query.
module score_cores #(
    parameter int QUERIES = 4,  // 2 or more
    parameter int HEAD_DIM = 128,
    parameter int KV = 8,
    parameter int G = 4,
    parameter int CODE_BITS = 4,
    parameter int MODE = 0,
    parameter int RULE = 1,
    parameter int STYLE = 1,
    parameter int SEGMENT_TOKENS = 1024,
    parameter int BLOCK_TOKENS = 1024
) (
    input  logic         clk,
    input  logic         rst,
    input  logic [  7:0] further,       // queries beside the first; stable, as the scope is
    // per segment with tokens: statistics beats (MODE 1), then a query block of each query
    input  logic         load_valid,
    output logic         load_ready,
    input  logic [511:0] load_data,
    input  logic         seg_valid,
    output logic         seg_ready,
    input  logic [ 16:0] seg_tokens,
    input  logic [ 15:0] seg_position,
    input  logic         scope,
    input  logic         key_valid,
    output logic         key_ready,
    input  logic [511:0] key_data,
    output logic         out_valid,
    input  logic         out_ready,
    output logic [511:0] out_data,
    output logic [  5:0] out_head,      // 0 for the first beat of 16 tokens only
    output logic         out_row_ends,  // the last beat of 16 tokens
    output logic         out_last
);
  localparam int TURN = $clog2(QUERIES);
  localparam int STATISTICS_BEATS = (MODE != 0) ? (KV * HEAD_DIM * 4 + 63) / 64 : 0;
  localparam int HEADS = KV * G;
  localparam int BLOCK_BEATS = (HEADS * 4 + 63) / 64 + (HEADS + 63) / 64
      + (HEADS * HEAD_DIM + 63) / 64;
  localparam int MOST_BEATS = (STATISTICS_BEATS > BLOCK_BEATS) ? STATISTICS_BEATS : BLOCK_BEATS;
  localparam int BEAT_BITS = $clog2(MOST_BEATS + 1);

  logic [QUERIES-1:0] active, load_taken, seg_taken, key_taken;  // a bit per query
  logic [QUERIES-1:0] core_load_valid, core_load_ready, core_seg_ready, core_key_ready;
  logic [QUERIES-1:0] core_valid, core_ready, core_last;
  logic [QUERIES*512-1:0] core_data;
  logic [QUERIES*6-1:0] core_head;
  logic [TURN-1:0] turn;

  // Which queries there are: compared a cycle earlier, long before the first beat of a launch.
  always_ff @(posedge clk) begin
    for (int i = 0; i < QUERIES; i = i + 1) active[i] <= i <= 32'(further);
  end

  // Loads: statistics are for all queries, a query block is for one.
  localparam int FIRST_BEATS = (STATISTICS_BEATS != 0) ? STATISTICS_BEATS : BLOCK_BEATS;
  logic for_all, block_ends;
  logic [TURN-1:0] owner;
  logic [BEAT_BITS-1:0] left;  // beats of the block, this one too; `block_ends` tells the last one
  assign load_ready = for_all ? &(core_load_ready | load_taken | ~active)
      : core_load_ready[owner];
  always_ff @(posedge clk) begin
    if (rst) begin
      for_all <= STATISTICS_BEATS != 0;
      left <= BEAT_BITS'(FIRST_BEATS);
      block_ends <= FIRST_BEATS == 1;
      owner <= '0;
    end else if (load_valid && load_ready) begin
      left <= left - 1'b1;
      block_ends <= left == 2;
      if (block_ends) begin
        left <= BEAT_BITS'(BLOCK_BEATS);
        block_ends <= BLOCK_BEATS == 1;
        for_all <= 1'b0;
        if (!for_all) owner <= owner + 1'b1;
        if (!for_all && 8'(owner) == further) begin
          owner <= '0;
          for_all <= STATISTICS_BEATS != 0;
          left <= BEAT_BITS'(FIRST_BEATS);
          block_ends <= FIRST_BEATS == 1;
        end
      end
    end
  end

  // What is for all leaves when the last one takes it: who has taken it is remembered, and nobody's
  // room decides what another one does in the same cycle.
  assign seg_ready = &(core_seg_ready | seg_taken | ~active);
  assign key_ready = &(core_key_ready | key_taken | ~active);
  always_ff @(posedge clk) begin
    load_taken <= (rst || !for_all || !load_valid || load_ready) ? '0
        : load_taken | core_load_ready;
    seg_taken <= (rst || !seg_valid || seg_ready) ? '0 : seg_taken | core_seg_ready;
    key_taken <= (rst || !key_valid || key_ready) ? '0 : key_taken | core_key_ready;
  end

  genvar q;
  generate
    for (q = 0; q < QUERIES; q = q + 1) begin : g_query
      assign core_load_valid[q] = load_valid
          && (for_all ? active[q] && !load_taken[q] : owner == q);
      score_core #(
          .HEAD_DIM(HEAD_DIM),
          .KV(KV),
          .G(G),
          .CODE_BITS(CODE_BITS),
          .MODE(MODE),
          .RULE(RULE),
          .STYLE(STYLE),
          .SEGMENT_TOKENS(SEGMENT_TOKENS),
          .BLOCK_TOKENS(BLOCK_TOKENS)
      ) core (
          .clk(clk),
          .rst(rst),
          .load_valid(core_load_valid[q]),
          .load_ready(core_load_ready[q]),
          .load_data(load_data),
          .seg_valid(seg_valid && active[q] && !seg_taken[q]),
          .seg_ready(core_seg_ready[q]),
          .seg_tokens(seg_tokens),
          .seg_position(seg_position),
          .scope(scope),
          .key_valid(key_valid && active[q] && !key_taken[q]),
          .key_ready(core_key_ready[q]),
          .key_data(key_data),
          .out_valid(core_valid[q]),
          .out_ready(core_ready[q]),
          .out_data(core_data[q*512+:512]),
          .out_head(core_head[q*6+:6]),
          .out_last(core_last[q])
      );
      assign core_ready[q] = out_ready && turn == q;
    end
  endgenerate

  // Tuples: the queries take turns, 16 tokens each. All of them have scored the same key beats but
  // the one that is there, so none waits for keys that another one keeps back.
  logic [5:0] head;
  logic own_ends, last_turn;
  assign head = core_head[turn*6+:6];
  assign own_ends = !scope || 32'(head) == KV - 1;
  assign last_turn = 8'(turn) == further;
  assign out_valid = core_valid[turn];
  assign out_data = core_data[turn*512+:512];
  assign out_head = (turn == 0) ? head : 6'd1;
  assign out_row_ends = own_ends && last_turn;
  assign out_last = core_last[turn] && last_turn;
  always_ff @(posedge clk) begin
    if (rst) turn <= '0;
    else if (out_valid && out_ready && own_ends) turn <= last_turn ? '0 : turn + 1'b1;
  end
endmodule
