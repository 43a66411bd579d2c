// SPDX-License-Identifier: Apache-2.0
// Scores one (tile, KV head) at a time: T tokens and G heads in STEPS steps of TOKEN_LANES tokens
// and HEAD_LANES heads, sums over heads, and codes the sums that are complete.
module score_tile #(
    parameter int KV = 8,
    parameter int G = 4,
    parameter int TILE_TOKENS = 8,
    parameter int RULE = 1,
    parameter int TOKEN_LANES = 1,
    parameter int HEAD_LANES = 4,
    parameter int HEAD_STEPS = 1,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1,
    parameter int STEP_BITS = (KV * HEAD_STEPS > 1) ? $clog2(KV * HEAD_STEPS) : 1
) (
    input  logic                        clk,
    input  logic                        rst,
    input  logic                        kv_head_scope,
    // addends and exponents of the two slots
    input  logic                        write_slot,
    input  logic [      HEAD_LANES-1:0] addend_write,
    input  logic [      HEAD_LANES-1:0] exponent_write,
    input  logic [       STEP_BITS-1:0] addend_word,
    input  logic [       STEP_BITS-1:0] exponent_word,
    input  logic [                31:0] write_addend,
    input  logic [                 7:0] write_exponent,
    // one tile of one KV head
    input  logic                        load,
    input  logic [TILE_TOKENS*G*23-1:0] products,    // token, then head
    input  logic [   TILE_TOKENS*8-1:0] exponents,
    input  logic [       HEAD_BITS-1:0] head,
    input  logic                        slot,
    input  logic [                 3:0] tile_token,  // first token, within its 16
    input  logic                        row_end,
    input  logic                        segment_end,
    input  logic [                11:0] row,
    input  logic [                 3:0] row_last,
    // codes that are complete
    output logic                        out_valid,
    output logic [  TOKEN_LANES*16-1:0] out_codes,
    output logic [                 3:0] out_token,
    output logic [                 5:0] out_set,
    output logic                        out_complete,
    output logic [                11:0] out_row,
    output logic [                 3:0] out_row_last,
    output logic                        out_segment_last,
    output logic                        segment_done   // nothing of the segment is read any more
);
  localparam int TILE_STEPS = TILE_TOKENS / TOKEN_LANES;
  localparam int STEPS = TILE_STEPS * HEAD_STEPS;
  localparam int UNITS = TOKEN_LANES * HEAD_LANES;
  localparam int LEVELS = (HEAD_LANES > 1) ? $clog2(HEAD_LANES) : 0;
  localparam int LEAVES = 1 << LEVELS;
  localparam int TERM = (RULE != 0) ? 48 : 33;
  localparam int TOTAL = TERM + LEVELS;
  localparam int SUM = (RULE != 0) ? 57 : 40;
  localparam int SUM_AT = (RULE != 0) ? 12 + LEVELS : 8;
  localparam int TB = (TILE_STEPS > 1) ? $clog2(TILE_STEPS) : 1;
  localparam int GB = (HEAD_STEPS > 1) ? $clog2(HEAD_STEPS) : 1;
  localparam int CODE_LATENCY = 5;

  genvar u, s, l, k;

  // Steps: what is at hand lies at the low end and moves down.
  logic [STEPS*UNITS*23-1:0] held, arranged;
  logic [TILE_TOKENS*8-1:0] held_exponents;
  generate
    for (s = 0; s < STEPS; s = s + 1) begin : g_step
      for (u = 0; u < UNITS; u = u + 1) begin : g_unit
        localparam int TOKEN = (s / HEAD_STEPS) * TOKEN_LANES + u / HEAD_LANES;
        localparam int HEAD = (s % HEAD_STEPS) * HEAD_LANES + u % HEAD_LANES;
        if (HEAD < G) begin : g_live
          assign arranged[(s*UNITS+u)*23+:23] = products[(TOKEN*G+HEAD)*23+:23];
        end else begin : g_spare
          assign arranged[(s*UNITS+u)*23+:23] = 23'd0;
        end
      end
    end
  endgenerate

  logic busy, last_group, last_step, held_slot, held_row_end, held_segment_end;
  logic [TB-1:0] tile_step;
  logic [GB-1:0] head_step;
  logic [STEP_BITS-1:0] head_word, step_word;
  logic [HEAD_BITS-1:0] held_head;
  logic [3:0] held_token, held_row_last;
  logic [11:0] held_row;
  assign last_group = 32'(head_step) == HEAD_STEPS - 1;
  assign last_step = last_group && 32'(tile_step) == TILE_STEPS - 1;

  always_ff @(posedge clk) begin
    if (load) begin
      held <= arranged;
      held_exponents <= exponents;
      held_head <= head;
      held_slot <= slot;
      held_token <= tile_token;
      held_row_end <= row_end;
      held_segment_end <= segment_end;
      held_row <= row;
      held_row_last <= row_last;
      head_word <= STEP_BITS'(32'(head) * HEAD_STEPS);
      step_word <= STEP_BITS'(32'(head) * HEAD_STEPS);
      tile_step <= '0;
      head_step <= '0;
    end else begin
      held <= held >> (UNITS * 23);
      if (last_group) held_exponents <= held_exponents >> (TOKEN_LANES * 8);
      head_step <= last_group ? '0 : head_step + 1'b1;
      step_word <= last_group ? head_word : step_word + 1'b1;
      if (last_group) tile_step <= tile_step + 1'b1;
    end
    if (rst) busy <= 1'b0;
    else if (load) busy <= 1'b1;
    else if (last_step) busy <= 1'b0;
  end

  // Score units.
  logic [STEP_BITS:0] exponent_address, addend_address;
  logic [UNITS*TERM-1:0] terms;
  logic [HEAD_LANES-1:0] live, live_late;
  logic [TOKEN_LANES*8-1:0] exponents1;
  assign exponent_address = {held_slot, step_word};
  delay_line #(
      .WIDTH (STEP_BITS + 1),
      .CYCLES(6)
  ) address_line (
      .clk(clk),
      .in (exponent_address),
      .out(addend_address)
  );
  delay_line #(
      .WIDTH (HEAD_LANES),
      .CYCLES(11)
  ) live_line (
      .clk(clk),
      .in (live),
      .out(live_late)
  );
  always_ff @(posedge clk) exponents1 <= held_exponents[TOKEN_LANES*8-1:0];

  generate
    for (k = 0; k < HEAD_LANES; k = k + 1) begin : g_lane
      logic [31:0] addend_read, addend;
      logic [7:0] exponent_read, exponent;
      assign live[k] = 32'(head_step) * HEAD_LANES + k < G;
      ram_lut #(
          .WIDTH(32),
          .DEPTH(2 << STEP_BITS)
      ) addends (
          .clk(clk),
          .write_enable(addend_write[k]),
          .write_address({write_slot, addend_word}),
          .write_data(write_addend),
          .read_address(addend_address),
          .read_data(addend_read)
      );
      ram_lut #(
          .WIDTH(8),
          .DEPTH(2 << STEP_BITS)
      ) query_exponents (
          .clk(clk),
          .write_enable(exponent_write[k]),
          .write_address({write_slot, exponent_word}),
          .write_data(write_exponent),
          .read_address(exponent_address),
          .read_data(exponent_read)
      );
      always_ff @(posedge clk) begin
        addend <= addend_read;
        exponent <= exponent_read;
      end
      for (l = 0; l < TOKEN_LANES; l = l + 1) begin : g_token
        logic [22:0] product;
        logic signed [32:0] aligned;
        always_ff @(posedge clk) product <= held[(l*HEAD_LANES+k)*23+:23];
        align_unit align (
            .clk(clk),
            .product(product),
            .query_exponent(exponent),
            .token_exponent(exponents1[l*8+:8]),
            .addend(addend),
            .aligned(aligned)
        );
        if (RULE != 0) begin : g_weight
          weight_unit weigh (
              .clk(clk),
              .log_weight(aligned),
              .live(live_late[k]),
              .weight(terms[(l*HEAD_LANES+k)*TERM+:TERM])
          );
        end else begin : g_raw
          assign terms[(l*HEAD_LANES+k)*TERM+:TERM] = aligned;
        end
      end
    end
  endgenerate

  // What belongs to the step whose sum over head lanes is at hand.
  localparam int FLAGS = 1 + 1 + 1 + TB + TOKEN_LANES + HEAD_BITS + 4 + 1 + 1 + 12 + 4;
  logic [FLAGS-1:0] step_flags, sum_flags;
  logic [TOKEN_LANES-1:0] invalid, sum_invalid;
  logic sum_first, sum_last, sum_clear, sum_valid;
  logic [TB-1:0] sum_tile_step;
  logic [FLAGS-TB-TOKEN_LANES-4:0] sum_place, place1, place2, place_out;
  generate
    for (l = 0; l < TOKEN_LANES; l = l + 1) begin : g_invalid
      assign invalid[l] = &held_exponents[l*8+:8];
    end
  endgenerate
  assign step_flags = {
    head_step == 0,
    last_group,
    kv_head_scope || held_head == 0,
    tile_step,
    invalid,
    held_head,
    held_token,
    held_row_end,
    held_segment_end,
    held_row,
    held_row_last
  };
  delay_line #(
      .WIDTH (FLAGS),
      .CYCLES(SUM_AT)
  ) flag_line (
      .clk(clk),
      .in (step_flags),
      .out(sum_flags)
  );
  pulse_line #(
      .CYCLES(SUM_AT)
  ) valid_line (
      .clk(clk),
      .rst(rst),
      .in (busy),
      .out(sum_valid)
  );
  assign {sum_first, sum_last, sum_clear, sum_tile_step, sum_invalid, sum_place}
      = sum_flags;

  logic valid1, valid2, first1, last1, last2;
  logic [TB-1:0] tile_step1, tile_step2;
  always_ff @(posedge clk) begin
    first1 <= sum_first;
    {last1, last2} <= {sum_last, last1};
    {tile_step1, tile_step2} <= {sum_tile_step, tile_step1};
    {place1, place2} <= {sum_place, place1};
    valid1 <= sum_valid && !rst;
    valid2 <= valid1 && !rst;
  end

  generate
    for (l = 0; l < TOKEN_LANES; l = l + 1) begin : g_sum
      // Sum over head lanes, a level per cycle.
      for (s = 0; s <= LEVELS; s = s + 1) begin : g_level
        logic [(LEAVES>>s)*TOTAL-1:0] value;
        if (s == 0) begin : g_leaves
          for (k = 0; k < LEAVES; k = k + 1) begin : g_leaf
            if (k < HEAD_LANES) begin : g_term
              if (RULE != 0) begin : g_unsigned
                assign value[k*TOTAL+:TOTAL] = TOTAL'(terms[(l*HEAD_LANES+k)*TERM+:TERM]);
              end else begin : g_signed
                assign value[k*TOTAL+:TOTAL] = TOTAL'($signed(terms[(l*HEAD_LANES+k)*TERM+:TERM]));
              end
            end else begin : g_none
              assign value[k*TOTAL+:TOTAL] = '0;
            end
          end
        end else begin : g_add
          for (k = 0; k < (LEAVES >> s); k = k + 1) begin : g_node
            always_ff @(posedge clk) begin
              value[k*TOTAL+:TOTAL] <= g_level[s-1].value[2*k*TOTAL+:TOTAL]
                  + g_level[s-1].value[(2*k+1)*TOTAL+:TOTAL];
            end
          end
        end
      end

      // Sum over heads, per token. Too wide to overflow; it saturates once, in score_code.
      logic [SUM-1:0] total1, base1, run;
      logic [SUM:0] kept;
      logic bad_total1, bad_base1, bad;
      always_ff @(posedge clk) begin
        if (RULE != 0) total1 <= SUM'(g_level[LEVELS].value);
        else total1 <= SUM'($signed(g_level[LEVELS].value));
        bad_total1 <= sum_invalid[l];
      end
      if (TILE_STEPS > 1) begin : g_tokens
        ram_lut #(
            .WIDTH(SUM + 1),
            .DEPTH(TILE_STEPS)
        ) sums (
            .clk(clk),
            .write_enable(valid2 && last2),
            .write_address(tile_step2),
            .write_data({bad, run}),
            .read_address(sum_tile_step),
            .read_data(kept)
        );
        always_ff @(posedge clk) begin
          {bad_base1, base1} <= sum_clear ? '0 : kept;
          run <= (first1 ? base1 : run) + total1;
          bad <= (first1 ? bad_base1 : bad) || bad_total1;
        end
      end else begin : g_token
        logic clear1;
        assign kept = '0;
        assign base1 = '0;
        assign bad_base1 = 1'b0;
        always_ff @(posedge clk) begin
          clear1 <= sum_clear;
          if (valid1) begin
            run <= ((first1 && clear1) ? '0 : run) + total1;
            bad <= (!(first1 && clear1) && bad) || bad_total1;
          end
        end
      end

      score_code #(
          .RULE (RULE),
          .WIDTH(SUM)
      ) coder (
          .clk(clk),
          .value(run),
          .invalid(bad),
          .code(out_codes[l*16+:16])
      );
    end
  endgenerate

  // Where the codes go.
  logic [HEAD_BITS-1:0] out_kv_head;
  logic [3:0] out_tile_token, out_row_last_token;
  logic [TB-1:0] out_tile_step;
  logic out_row_end, out_segment_end, out_last, out_busy, last_head;
  delay_line #(
      .WIDTH (1 + TB + FLAGS - TB - TOKEN_LANES - 3),
      .CYCLES(CODE_LATENCY)
  ) place_line (
      .clk(clk),
      .in ({last2, tile_step2, place2}),
      .out({out_last, out_tile_step, place_out})
  );
  pulse_line #(
      .CYCLES(CODE_LATENCY)
  ) busy_line (
      .clk(clk),
      .rst(rst),
      .in (valid2),
      .out(out_busy)
  );
  assign {out_kv_head, out_tile_token, out_row_end, out_segment_end, out_row, out_row_last_token}
      = place_out;
  assign last_head = 32'(out_kv_head) == KV - 1;
  assign out_valid = out_busy && out_last && (kv_head_scope || last_head);
  assign out_token = out_tile_token + 4'(32'(out_tile_step) * TOKEN_LANES);
  assign out_set = kv_head_scope ? 6'(out_kv_head) : 6'd0;
  assign out_complete = out_row_end && 32'(out_tile_step) == TILE_STEPS - 1;
  // The last row may end short of 16 tokens.
  assign out_row_last = out_segment_end ? out_row_last_token : 4'd15;
  assign out_segment_last = out_segment_end && last_head;
  assign segment_done = out_valid && out_complete && out_segment_last;
endmodule
