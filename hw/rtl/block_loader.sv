// SPDX-License-Identifier: Apache-2.0
// Takes a segment's statistics beats and query block apart into the words its buffers hold.
// Two slots: one segment is loaded while another is computed. Statistics go a beat per cycle;
// the query block goes in quarters of a beat (128 bits: the 16 codes of one head and slice).
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
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  load_valid,
    output logic                  load_ready,
    input  logic [         511:0] load_data,
    input  logic                  release_slot,
    output logic                  loaded,          // one pulse per segment
    output logic                  slot,
    output logic                  statistics_write,
    output logic [ WORD_BITS-1:0] statistics_word, // half-beat of 16 channels within a row
    output logic [LANE_HEADS-1:0] addend_write,
    output logic [LANE_HEADS-1:0] exponent_write,
    output logic [ HEAD_BITS-1:0] head_word,
    output logic [          31:0] addend,
    output logic [           7:0] exponent,
    output logic [         G-1:0] code_write,
    output logic [ WORD_BITS-1:0] code_word,
    output logic [         127:0] codes
);
  localparam int HEADS = KV * G;
  localparam int WORDS = KV * SLICES;
  localparam logic [1:0] STAT = 2'd0, ADDEND = 2'd1, EXPONENT = 2'd2, CODES = 2'd3;
  localparam logic [1:0] FIRST = (STATISTICS != 0) ? STAT : ADDEND;
  localparam int CB = $clog2(WORDS * G + HEADS + 1);

  logic [1:0] phase, free_slots, quarter, quarter_phase;
  logic started, quarter_valid, quarter_end;
  logic take, take_last, part_done, word_done, segment_end;
  logic [127:0] selected, held;
  logic [CB-1:0] left;  // words of the part not yet taken into `held`, in units of a quarter
  logic [3:0] part_index;
  logic [$clog2(LANE_HEADS+1)-1:0] lane;
  logic [$clog2(G+1)-1:0] head;
  logic [HEAD_BITS-1:0] step_word;
  logic [WORD_BITS-1:0] word;
  logic last_word_of_quarter, may_start, done_pending;
  logic [$clog2(HEADS+1)-1:0] heads_left;

  function automatic logic [CB-1:0] quarters(input logic [1:0] which);
    case (which)
      ADDEND: quarters = CB'((HEADS + 3) / 4);
      EXPONENT: quarters = CB'((HEADS + 15) / 16);
      default: quarters = CB'(HEADS * SLICES);
    endcase
  endfunction

  assign may_start = started || free_slots != 0;
  assign selected = load_data[quarter*128+:128];
  assign statistics_write = (STATISTICS != 0) && phase == STAT && load_valid && load_ready;
  assign part_done = left == 1;
  assign take = phase != STAT && load_valid && may_start && !done_pending
      && (!quarter_valid || last_word_of_quarter);
  // The rest of a part's last beat is padding.
  assign take_last = take && (quarter == 2'd3 || part_done);
  assign load_ready = (phase == STAT) ? (may_start && !done_pending) : take_last;

  always_comb begin
    case (quarter_phase)
      ADDEND: last_word_of_quarter = part_index[1:0] == 2'd3 || word_done;
      EXPONENT: last_word_of_quarter = part_index == 4'd15 || word_done;
      default: last_word_of_quarter = 1'b1;
    endcase
  end
  // Heads end inside a quarter too: KV * G need not be a multiple of 4 or 16.
  assign word_done = heads_left == 1;
  assign segment_end = quarter_valid && quarter_phase == CODES && quarter_end;

  always_ff @(posedge clk) begin
    if (take) held <= selected;
    loaded <= 1'b0;
    if (rst) begin
      phase <= FIRST;
      started <= 1'b0;
      free_slots <= 2'd2;
      quarter <= '0;
      quarter_valid <= 1'b0;
      left <= (STATISTICS != 0) ? CB'(WORDS) : quarters(ADDEND);
      slot <= 1'b0;
      statistics_word <= '0;
      done_pending <= 1'b0;
      quarter_phase <= ADDEND;
      quarter_end <= 1'b0;
    end else begin
      if (load_valid && load_ready && phase == STAT) begin
        started <= 1'b1;
        statistics_word <= part_done ? '0 : statistics_word + 1'b1;
        left <= left - 1'b1;
        if (part_done) begin
          if (QUERIES != 0) begin
            phase <= ADDEND;
            left <= quarters(ADDEND);
          end else begin
            left <= CB'(WORDS);
            started <= 1'b0;
            loaded <= 1'b1;
            slot <= ~slot;
          end
        end
      end
      if (take) begin
        started <= 1'b1;
        quarter <= part_done ? 2'd0 : quarter + 1'b1;
        left <= left - 1'b1;
        quarter_phase <= phase;
        quarter_end <= part_done;
        if (part_done) begin
          case (phase)
            ADDEND: begin
              phase <= EXPONENT;
              left <= quarters(EXPONENT);
            end
            EXPONENT: begin
              phase <= CODES;
              left <= quarters(CODES);
            end
            default: begin
              phase <= FIRST;
              left <= (STATISTICS != 0) ? CB'(WORDS) : quarters(ADDEND);
              done_pending <= 1'b1;
            end
          endcase
        end
      end
      if (take) quarter_valid <= 1'b1;
      else if (last_word_of_quarter) quarter_valid <= 1'b0;
      if (segment_end) begin
        done_pending <= 1'b0;
        started <= 1'b0;
        loaded <= 1'b1;
        slot <= ~slot;
      end
      free_slots <= free_slots + {1'b0, release_slot} - {1'b0, !started && load_valid
          && ((phase == STAT && load_ready) || take)};
    end
  end

  // Where the word at hand goes: counters over heads, then over slices and heads.
  always_ff @(posedge clk) begin
    if (rst) begin
      part_index <= '0;
      lane <= '0;
      head <= '0;
      step_word <= '0;
      word <= '0;
      heads_left <= ($clog2(HEADS + 1))'(HEADS);
    end else if (quarter_valid) begin
      if (quarter_phase == CODES) begin
        head <= (32'(head) == G - 1) ? '0 : head + 1'b1;
        if (32'(head) == G - 1) word <= (32'(word) == WORDS - 1) ? '0 : word + 1'b1;
      end else begin
        part_index <= last_word_of_quarter ? '0 : part_index + 1'b1;
        heads_left <= word_done ? ($clog2(HEADS + 1))'(HEADS) : heads_left - 1'b1;
        head <= (32'(head) == G - 1) ? '0 : head + 1'b1;
        if (32'(head) == G - 1) begin
          lane <= '0;
          // A KV head always takes STEPS words, also where its last ones hold no head.
          step_word <= word_done ? '0
              : step_word + HEAD_BITS'(STEPS - (G - 1) / LANE_HEADS);
        end else if (32'(lane) == LANE_HEADS - 1) begin
          lane <= '0;
          step_word <= step_word + 1'b1;
        end else begin
          lane <= lane + 1'b1;
        end
      end
    end
  end

  assign head_word = step_word;
  assign code_word = word;
  assign codes = held;
  assign addend = held[part_index[1:0]*32+:32];
  assign exponent = held[part_index*8+:8];
  always_comb begin
    addend_write = '0;
    exponent_write = '0;
    code_write = '0;
    addend_write[lane] = quarter_valid && quarter_phase == ADDEND;
    exponent_write[lane] = quarter_valid && quarter_phase == EXPONENT;
    code_write[head] = quarter_valid && quarter_phase == CODES;
  end
endmodule
