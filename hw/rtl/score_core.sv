// SPDX-License-Identifier: Apache-2.0
// Datapath of score_tokens: key beats and query blocks in, beats of 16 tuples out. Takes a key
// beat per cycle; nothing in it waits, because a beat that completes tuples is only taken when
// there is room for them.
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
    // per segment with tokens: statistics beats (MODE 1), then the query block
    input  logic         load_valid,
    output logic         load_ready,
    input  logic [511:0] load_data,
    // the segments with tokens, in the order of their loads
    input  logic         seg_valid,
    output logic         seg_ready,
    input  logic [ 16:0] seg_tokens,
    input  logic [ 15:0] seg_position,
    input  logic         scope,         // 0 layer, 1 kv_head; stable while segments are computed
    // their key beats
    input  logic         key_valid,
    output logic         key_ready,
    input  logic [511:0] key_data,
    // their tuples
    output logic         out_valid,
    input  logic         out_ready,
    output logic [511:0] out_data,
    output logic [  5:0] out_head,
    output logic         out_last
);
  localparam int SLICES = HEAD_DIM / 16;
  localparam int HALVES = (MODE != 0) ? 2 : 1;
  localparam int TILE_TOKENS = (MODE != 0) ? 1 : 32 / CODE_BITS;
  // A score unit may take as many cycles as a KV head's beats: token lanes and head lanes follow.
  localparam int BEATS = SLICES / HALVES;
  localparam int TOKEN_STEPS = (BEATS >= 16) ? 16 : (BEATS >= 8) ? 8 : (BEATS >= 4) ? 4 : 2;
  localparam int TOKEN_LANES = (TILE_TOKENS > TOKEN_STEPS) ? TILE_TOKENS / TOKEN_STEPS : 1;
  localparam int HEAD_BUDGET = BEATS * TOKEN_LANES / TILE_TOKENS;
  localparam int HEAD_LANES = (G + HEAD_BUDGET - 1) / HEAD_BUDGET;
  localparam int HEAD_STEPS = (G + HEAD_LANES - 1) / HEAD_LANES;
  localparam int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1;
  localparam int STEP_BITS = (KV * HEAD_STEPS > 1) ? $clog2(KV * HEAD_STEPS) : 1;
  localparam int WORD_BITS = $clog2(KV * SLICES);
  localparam int SUMS = TILE_TOKENS * G;
  localparam int CODES = HALVES * TILE_TOKENS * 16 * CODE_BITS;
  // Cycles from a beat's acceptance to its dot products, and to its head's.
  localparam int DOT_AT = 10;
  localparam int TOTAL_AT = DOT_AT + HALVES;

  // Buffers of a segment's blocks.
  logic loaded, write_slot, statistics_write, segment_done;
  logic [WORD_BITS-1:0] statistics_word;
  logic [HEAD_LANES-1:0] addend_write, exponent_write;
  logic [STEP_BITS-1:0] addend_word, exponent_word;
  logic [31:0] addend;
  logic [7:0] exponent;
  logic [G-1:0] code_write;
  logic [G*WORD_BITS-1:0] code_word;
  logic [G*128-1:0] query_codes;
  block_loader #(
      .SLICES(SLICES),
      .KV(KV),
      .G(G),
      .LANE_HEADS(HEAD_LANES),
      .STEPS(HEAD_STEPS),
      .STATISTICS(MODE),
      .QUERIES(1)
  ) loader (
      .clk(clk),
      .rst(rst),
      .load_valid(load_valid),
      .load_ready(load_ready),
      .load_data(load_data),
      .release_slot(segment_done),
      .loaded(loaded),
      .slot(write_slot),
      .statistics_write(statistics_write),
      .statistics_word(statistics_word),
      .addend_write(addend_write),
      .addend_word(addend_word),
      .addend(addend),
      .exponent_write(exponent_write),
      .exponent_word(exponent_word),
      .exponent(exponent),
      .code_write(code_write),
      .code_word(code_word),
      .codes(query_codes)
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
      .seg_position(seg_position),
      .next_valid(next_valid),
      .next_ready(next_ready),
      .next_tokens(next_tokens),
      .next_row(next_row),
      .next_slot(next_slot)
  );

  // A beat of codes: `beat_*` at its acceptance, `codes2` two cycles later with the query words.
  logic credit_available, take_credit, beat_codes, beat_first, beat_last, beat_split, beat_slot;
  logic [HEAD_BITS-1:0] beat_head;
  logic [WORD_BITS-1:0] beat_word;
  logic [5:0] beat_tile_token;
  logic [11:0] beat_row;
  logic beat_row_end, beat_segment_end;
  logic [3:0] beat_row_last;
  logic [CODES-1:0] codes2;
  logic [TILE_TOKENS*8-1:0] load_exponents;

  genvar g, h;
  generate
    if (MODE == 0) begin : g_shadow
      logic beat_exponents;
      logic [2:0] bank;
      tile_sequencer #(
          .SLICES(SLICES),
          .KV(KV),
          .TILE_TOKENS(TILE_TOKENS)
      ) sequencer (
          .clk(clk),
          .rst(rst),
          .kv_head_scope(scope),
          .next_valid(next_valid),
          .next_ready(next_ready),
          .next_tokens(next_tokens),
          .next_row(next_row),
          .next_slot(next_slot),
          .key_valid(key_valid),
          .key_ready(key_ready),
          .credit_available(credit_available),
          .take_credit(take_credit),
          .exponents(beat_exponents),
          .codes(beat_codes),
          .bank(bank),
          .head(beat_head),
          .first_slice(beat_first),
          .last_slice(beat_last),
          .word(beat_word),
          .slot(beat_slot),
          .tile_token(beat_tile_token),
          .row(beat_row),
          .row_end(beat_row_end),
          .segment_end(beat_segment_end),
          .row_last(beat_row_last)
      );
      assign beat_split = 1'b0;
      delay_line #(
          .WIDTH (512),
          .CYCLES(2)
      ) codes_line (
          .clk(clk),
          .in (key_data),
          .out(codes2)
      );
      exponent_buffer #(
          .KV(KV),
          .TILE_TOKENS(TILE_TOKENS),
          .CYCLES(TOTAL_AT)
      ) exponents (
          .clk(clk),
          .write_enable(beat_exponents),
          .write_data(key_data),
          .bank(bank),
          .head(beat_head),
          .tile_token(beat_tile_token),
          .tile_exponents(load_exponents)
      );
    end else begin : g_rows
      // Three cycles from a beat's leaving the cast, so that its codes come two later still.
      logic leaves, first, last, split, spare, slot, row_start, row_done, segment_end, row_end;
      logic statistics_done;
      logic [HEAD_BITS-1:0] head;
      logic [WORD_BITS-1:0] word;
      logic [15:0] token;
      logic [11:0] row;
      logic [3:0] row_last, token_late;
      logic [7:0] low_exponent;
      head_cast #(
          .SLICES(SLICES),
          .KV(KV),
          .CODE_BITS(8)
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
          .room(credit_available),
          .beat(leaves),
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
          .codes(codes2)
      );
      assign row_end = segment_end || &token[3:0];
      assign take_credit = leaves && last && row_end && (scope || 32'(head) == KV - 1);
      pulse_line #(
          .CYCLES(3)
      ) beat_line (
          .clk(clk),
          .rst(rst),
          .in (leaves),
          .out(beat_codes)
      );
      delay_line #(
          .WIDTH (HEAD_BITS + WORD_BITS + 26),
          .CYCLES(3)
      ) beat_flags (
          .clk(clk),
          .in({
            head, word, first, last, split, slot, token[3:0], row, row_end, segment_end, row_last
          }),
          .out({
            beat_head,
            beat_word,
            beat_first,
            beat_last,
            beat_split,
            beat_slot,
            token_late,
            beat_row,
            beat_row_end,
            beat_segment_end,
            beat_row_last
          })
      );
      assign beat_tile_token = {2'b00, token_late};
      delay_line #(
          .WIDTH (8),
          .CYCLES(TOTAL_AT + 2)
      ) exponent_line (
          .clk(clk),
          .in (low_exponent),
          .out(load_exponents)
      );
    end
  endgenerate

  // Query words of the beat.
  logic [HALVES*G*128-1:0] query2;
  generate
    for (h = 0; h < HALVES; h = h + 1) begin : g_half
      for (g = 0; g < G; g = g + 1) begin : g_head
        localparam int ADDRESS = WORD_BITS + 2 - HALVES;
        wire [WORD_BITS-1:0] word = code_word[g*WORD_BITS+:WORD_BITS];
        ram_block #(
            .WIDTH(128),
            .DEPTH(1 << ADDRESS)
        ) memory (
            .clk(clk),
            .write_enable(code_write[g] && (HALVES == 1 || word[0] == h)),
            .write_address({write_slot, word[WORD_BITS-1:HALVES-1]}),
            .write_data(query_codes[g*128+:128]),
            .read_enable(1'b1),
            .read_address({beat_slot, beat_word[WORD_BITS-1:HALVES-1]}),
            .read_data(query2[(h*G+g)*128+:128])
        );
      end
    end
  endgenerate

  logic [HALVES*SUMS*19-1:0] parts;
  logic [SUMS*23-1:0] totals;
  generate
    for (h = 0; h < HALVES; h = h + 1) begin : g_dot
      dot_beat #(
          .TOKENS(TILE_TOKENS),
          .G(G),
          .CODE_BITS(CODE_BITS),
          .STYLE(STYLE)
      ) dot (
          .clk(clk),
          .codes(codes2[h*CODES/HALVES+:CODES/HALVES]),
          .query(query2[h*G*128+:G*128]),
          .sums(parts[h*SUMS*19+:SUMS*19])
      );
    end
  endgenerate

  logic dot_valid, dot_first, dot_split, total_valid;
  pulse_line #(
      .CYCLES(DOT_AT)
  ) dot_line (
      .clk(clk),
      .rst(rst),
      .in (beat_codes),
      .out(dot_valid)
  );
  delay_line #(
      .WIDTH (2),
      .CYCLES(DOT_AT)
  ) dot_flags (
      .clk(clk),
      .in ({beat_first, beat_split}),
      .out({dot_first, dot_split})
  );
  head_sum #(
      .SUMS(SUMS),
      .HALVES(HALVES)
  ) sum (
      .clk(clk),
      .valid(dot_valid),
      .first(dot_first),
      .split(dot_split),
      .parts(parts),
      .totals(totals)
  );
  pulse_line #(
      .CYCLES(TOTAL_AT)
  ) total_line (
      .clk(clk),
      .rst(rst),
      .in (beat_codes && beat_last),
      .out(total_valid)
  );

  logic [HEAD_BITS-1:0] total_head;
  logic total_slot, total_row_end, total_segment_end;
  logic [3:0] total_token, total_row_last;
  logic [11:0] total_row;
  delay_line #(
      .WIDTH (HEAD_BITS + 23),
      .CYCLES(TOTAL_AT)
  ) total_flags (
      .clk(clk),
      .in({
        beat_head,
        beat_slot,
        beat_tile_token[3:0],
        beat_row_end,
        beat_segment_end,
        beat_row,
        beat_row_last
      }),
      .out({
        total_head,
        total_slot,
        total_token,
        total_row_end,
        total_segment_end,
        total_row,
        total_row_last
      })
  );

  logic codes_valid, codes_complete, codes_segment_last;
  logic [TOKEN_LANES*16-1:0] codes;
  logic [3:0] codes_token, codes_row_last;
  logic [5:0] codes_set;
  logic [11:0] codes_row;
  score_tile #(
      .KV(KV),
      .G(G),
      .TILE_TOKENS(TILE_TOKENS),
      .RULE(RULE),
      .TOKEN_LANES(TOKEN_LANES),
      .HEAD_LANES(HEAD_LANES),
      .HEAD_STEPS(HEAD_STEPS)
  ) scores (
      .clk(clk),
      .rst(rst),
      .kv_head_scope(scope),
      .write_slot(write_slot),
      .addend_write(addend_write),
      .exponent_write(exponent_write),
      .addend_word(addend_word),
      .exponent_word(exponent_word),
      .write_addend(addend),
      .write_exponent(exponent),
      .load(total_valid),
      .products(totals),
      .exponents(load_exponents),
      .head(total_head),
      .slot(total_slot),
      .tile_token(total_token),
      .row_end(total_row_end),
      .segment_end(total_segment_end),
      .row(total_row),
      .row_last(total_row_last),
      .out_valid(codes_valid),
      .out_codes(codes),
      .out_token(codes_token),
      .out_set(codes_set),
      .out_complete(codes_complete),
      .out_row(codes_row),
      .out_row_last(codes_row_last),
      .out_segment_last(codes_segment_last),
      .segment_done(segment_done)
  );

  tuple_rows #(
      .LANES(TOKEN_LANES),
      .SETS (KV)
  ) tuples (
      .clk(clk),
      .rst(rst),
      .take_credit(take_credit),
      .credit_available(credit_available),
      .in_valid(codes_valid),
      .in_codes(codes),
      .in_token(codes_token),
      .in_set(codes_set),
      .in_complete(codes_complete),
      .in_row(codes_row),
      .in_row_last(codes_row_last),
      .in_segment_last(codes_segment_last),
      .out_valid(out_valid),
      .out_ready(out_ready),
      .out_data(out_data),
      .out_head(out_head),
      .out_last(out_last)
  );
endmodule
