// SPDX-License-Identifier: Apache-2.0
// Takes a segment's statistics beats and query block apart into the words its buffers hold.
// Two slots: one segment is loaded while another is computed. Beats of codes go as fast as they
// come where G >= 4: their words (the 16 codes of one head and slice) fall to different heads,
// each with a memory of its own. Addends and exponents follow one by one from a register, while
// the codes behind them are taken.
module block_loader #(
    parameter int SLICES = 8,
    parameter int KV = 8,
    parameter int G = 4,
    parameter int LANE_HEADS = 4,    // query heads of a KV head scored in one step
    parameter int STEPS = 1,         // steps for all of them: ceil(G / LANE_HEADS) or more
    parameter int STATISTICS = 0,    // 1 where a statistics block leads
    parameter int QUERIES = 1,       // 1 where a query block follows
    parameter int HEAD_BITS = (KV * STEPS > 1) ? $clog2(KV * STEPS) : 1,
    parameter int WORD_BITS = $clog2(KV * SLICES)
) (
    input  logic                   clk,
    input  logic                   rst,
    input  logic                   load_valid,
    output logic                   load_ready,
    input  logic [          511:0] load_data,
    input  logic                   release_slot,
    output logic                   loaded,          // one pulse per segment, with its last word
    output logic                   slot,
    output logic                   statistics_write,
    output logic [  WORD_BITS-1:0] statistics_word, // half-beat of 16 channels within a row
    output logic [ LANE_HEADS-1:0] addend_write,
    output logic [  HEAD_BITS-1:0] addend_word,
    output logic [           31:0] addend,
    output logic [ LANE_HEADS-1:0] exponent_write,
    output logic [  HEAD_BITS-1:0] exponent_word,
    output logic [            7:0] exponent,
    output logic [          G-1:0] code_write,      // and of each head: where, and the codes
    output logic [G*WORD_BITS-1:0] code_word,
    output logic [      G*128-1:0] codes
);
  localparam int HEADS = KV * G;
  localparam int WORDS = KV * SLICES;
  // Words of one cycle, and cycles of one beat.
  localparam int PER = (G >= 4) ? 4 : (G >= 2) ? 2 : 1;
  localparam int PARTS = 4 / PER;
  localparam int ADDEND_BEATS = (HEADS + 15) / 16;
  localparam int EXPONENT_BEATS = (HEADS + 63) / 64;
  localparam int CODE_STEPS = (WORDS * G + PER - 1) / PER;
  localparam int MOST = (CODE_STEPS > WORDS) ? CODE_STEPS : WORDS;
  localparam int CB = $clog2(MOST + 1);
  localparam int GB = $clog2(G + PER);
  localparam logic [1:0] STAT = 2'd0, ADDEND = 2'd1, EXPONENT = 2'd2, CODES = 2'd3;
  localparam logic [1:0] FIRST = (STATISTICS != 0) ? STAT : ADDEND;

  logic [1:0] phase, free_slots;
  logic started, begins, codes_done, may_start, step, beat_ends, ends, addends_ready, exponents_ready;
  logic addends_done, exponents_done;
  logic [CB-1:0] left;  // steps of the phase, this one too; `ends` tells the last one
  logic [1:0] part;

  function automatic logic [CB-1:0] steps_of(input logic [1:0] which);
    case (which)
      STAT: steps_of = CB'(WORDS);
      ADDEND: steps_of = CB'(ADDEND_BEATS);
      EXPONENT: steps_of = CB'(EXPONENT_BEATS);
      default: steps_of = CB'(CODE_STEPS);
    endcase
  endfunction

  // Between a segment's last step and `loaded` nothing of the next one is taken.
  assign may_start = (started || free_slots != 0) && !codes_done;
  // The rest of the last beat is padding.
  assign beat_ends = PARTS == 1 || phase != CODES || part == 2'(PARTS - 1) || ends;
  assign step = load_valid && may_start && (phase != ADDEND || addends_ready)
      && (phase != EXPONENT || exponents_ready);
  assign load_ready = may_start && beat_ends && (phase != ADDEND || addends_ready)
      && (phase != EXPONENT || exponents_ready);
  assign begins = !started && step;
  assign statistics_write = (STATISTICS != 0) && phase == STAT && step;
  // Addends and exponents need at most as many cycles as there are codes behind them, mostly.
  assign loaded = (QUERIES == 0) ? step && ends
      : addends_done && exponents_done && (codes_done || (phase == CODES && step && ends));

  always_ff @(posedge clk) begin
    if (rst) begin
      phase <= FIRST;
      left <= steps_of(FIRST);
      ends <= steps_of(FIRST) == 1;
      part <= '0;
      started <= 1'b0;
      codes_done <= 1'b0;
      free_slots <= 2'd2;
      slot <= 1'b0;
      statistics_word <= '0;
    end else begin
      if (step) begin
        started <= 1'b1;
        left <= left - 1'b1;
        ends <= left == 2;
        if (phase == STAT) statistics_word <= ends ? '0 : statistics_word + 1'b1;
        if (phase == CODES) part <= beat_ends ? '0 : part + 1'b1;
        if (ends) begin
          case (phase)
            STAT: begin
              phase <= (QUERIES != 0) ? ADDEND : FIRST;
              left <= steps_of((QUERIES != 0) ? ADDEND : FIRST);
              ends <= steps_of((QUERIES != 0) ? ADDEND : FIRST) == 1;
            end
            ADDEND: begin
              phase <= EXPONENT;
              left <= steps_of(EXPONENT);
              ends <= steps_of(EXPONENT) == 1;
            end
            EXPONENT: begin
              phase <= CODES;
              left <= steps_of(CODES);
              ends <= steps_of(CODES) == 1;
            end
            default: begin
              phase <= FIRST;
              left <= steps_of(FIRST);
              ends <= steps_of(FIRST) == 1;
              codes_done <= 1'b1;
            end
          endcase
        end
      end
      if (loaded) begin
        codes_done <= 1'b0;
        started <= 1'b0;
        slot <= ~slot;
      end
      free_slots <= free_slots + {1'b0, release_slot} - {1'b0, begins};
    end
  end

  // Addends and exponents: a beat is held while its numbers go one by one.
  generate
    if (QUERIES != 0) begin : g_numbers
      number_loader #(
          .HEADS(HEADS),
          .G(G),
          .LANE_HEADS(LANE_HEADS),
          .STEPS(STEPS),
          .WIDTH(32),
          .WORD_BITS(HEAD_BITS)
      ) addends (
          .clk(clk),
          .rst(rst),
          .in_valid(step && phase == ADDEND),
          .in_ready(addends_ready),
          .in_data(load_data),
          .done(addends_done),
          .write(addend_write),
          .word(addend_word),
          .number(addend)
      );
      number_loader #(
          .HEADS(HEADS),
          .G(G),
          .LANE_HEADS(LANE_HEADS),
          .STEPS(STEPS),
          .WIDTH(8),
          .WORD_BITS(HEAD_BITS)
      ) exponents (
          .clk(clk),
          .rst(rst),
          .in_valid(step && phase == EXPONENT),
          .in_ready(exponents_ready),
          .in_data(load_data),
          .done(exponents_done),
          .write(exponent_write),
          .word(exponent_word),
          .number(exponent)
      );
    end else begin : g_none
      assign {addends_ready, exponents_ready, addends_done, exponents_done} = 4'b1111;
      assign addend_write = '0;
      assign exponent_write = '0;
      assign addend_word = '0;
      assign exponent_word = '0;
      assign addend = '0;
      assign exponent = '0;
    end
  endgenerate

  // Codes: the words of a step are those of heads first_head, first_head + 1, ... of `word`, and
  // behind the last head those of the next word.
  logic [GB-1:0] first_head, next_head;
  logic [WORD_BITS-1:0] word;
  logic [$clog2(WORDS*G+1)-1:0] words_left;
  logic [PER*128-1:0] lanes;
  assign lanes = load_data[part*PER*128+:PER*128];
  assign next_head = first_head + GB'(PER);
  always_ff @(posedge clk) begin
    if (rst || loaded) begin
      first_head <= '0;
      word <= '0;
      words_left <= ($clog2(WORDS * G + 1))'(WORDS * G);
    end else if (phase == CODES && step) begin
      first_head <= (32'(next_head) >= G) ? next_head - GB'(G) : next_head;
      if (32'(next_head) >= G) word <= word + 1'b1;
      words_left <= words_left - ($clog2(WORDS * G + 1))'(PER);
    end
  end
  genvar g;
  generate
    for (g = 0; g < G; g = g + 1) begin : g_head
      logic behind;
      logic [GB-1:0] lane;
      assign behind = g < 32'(first_head);
      assign lane = behind ? GB'(G + g) - first_head : GB'(g) - first_head;
      assign code_write[g] = phase == CODES && step && 32'(lane) < PER
          && 32'(lane) < 32'(words_left);
      assign code_word[g*WORD_BITS+:WORD_BITS] = behind ? word + 1'b1 : word;
      if (PER == 1) begin : g_one
        assign codes[g*128+:128] = lanes;
      end else begin : g_more
        assign codes[g*128+:128] = lanes[lane[$clog2(PER)-1:0]*128+:128];
      end
    end
  endgenerate
endmodule
