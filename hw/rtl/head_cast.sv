// SPDX-License-Identifier: Apache-2.0
// Casts FP16 rows to key codes. Channels are centred as they come and wait in a FIFO until the
// largest of their KV head, and so its token exponent, is known. Codes leave CODES_AT cycles
// after `beat` says what they are.
module head_cast #(
    parameter int SLICES = 8,
    parameter int KV = 8,
    parameter int CODE_BITS = 8,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1,
    parameter int WORD_BITS = $clog2(KV * SLICES)
) (
    input  logic                    clk,
    input  logic                    rst,
    input  logic                    write_slot,
    input  logic                    statistics_write,
    input  logic [   WORD_BITS-1:0] statistics_word,
    input  logic [           511:0] statistics_data,
    input  logic                    next_valid,
    output logic                    next_ready,
    input  logic [            16:0] next_tokens,
    input  logic [            11:0] next_row,
    input  logic                    next_slot,
    input  logic                    key_valid,
    output logic                    key_ready,
    input  logic [           511:0] key_data,
    output logic                    statistics_done, // nobody reads the segment's any more
    // what leaves, where `room` lets it
    input  logic                    room,
    output logic                    beat,
    output logic                    first,
    output logic                    last,
    output logic                    split,
    output logic                    spare,
    output logic [   HEAD_BITS-1:0] head,
    output logic [   WORD_BITS-1:0] word,
    output logic                    slot,
    output logic [            15:0] token,
    output logic                    row_start,
    output logic                    row_done,
    output logic                    segment_end,
    output logic [            11:0] position_row,
    output logic [             3:0] row_last,
    output logic [             7:0] low_exponent,    // 1 cycle later: of the low slice's head
    output logic [32*CODE_BITS-1:0] codes            // 5 cycles later
);
  localparam int DEPTH = 32;
  localparam int SHIFT = (CODE_BITS == 8) ? 7 : 3;
  genvar i, h;

  // In: what each beat is, and its statistics.
  logic in_accept, in_active, in_first, in_last, in_split, in_spare, in_slot, in_room;
  logic [WORD_BITS-1:0] in_word;
  assign key_ready = in_active && in_room;
  assign in_accept = key_valid && key_ready;
  assign statistics_done = in_accept && in_row_done && in_segment_end;
  logic [HEAD_BITS-1:0] in_head;
  logic [15:0] in_token;
  logic in_row_start, in_row_done, in_segment_end;
  logic [11:0] in_position_row;
  logic [3:0] in_row_last;
  row_sequencer #(
      .SLICES(SLICES),
      .KV(KV)
  ) arriving (
      .clk(clk),
      .rst(rst),
      .next_valid(next_valid),
      .next_ready(next_ready),
      .next_tokens(next_tokens),
      .next_row(next_row),
      .next_slot(next_slot),
      .active(in_active),
      .accept(in_accept),
      .first(in_first),
      .last(in_last),
      .split(in_split),
      .spare(in_spare),
      .head(in_head),
      .word(in_word),
      .slot(in_slot),
      .token(in_token),
      .row_start(in_row_start),
      .row_done(in_row_done),
      .segment_end(in_segment_end),
      .position_row(in_position_row),
      .row_last(in_row_last)
  );

  logic [1023:0] statistics;
  logic [511:0] key2;
  generate
    for (h = 0; h < 2; h = h + 1) begin : g_bank
      ram_block #(
          .WIDTH(512),
          .DEPTH(1 << WORD_BITS)
      ) bank (
          .clk(clk),
          .write_enable(statistics_write && statistics_word[0] == h),
          .write_address({write_slot, statistics_word[WORD_BITS-1:1]}),
          .write_data(statistics_data),
          .read_enable(1'b1),
          .read_address({in_slot, in_word[WORD_BITS-1:1]}),
          .read_data(statistics[h*512+:512])
      );
    end
  endgenerate
  delay_line #(
      .WIDTH (512),
      .CYCLES(2)
  ) key_line (
      .clk(clk),
      .in (key_data),
      .out(key2)
  );

  logic [32*24-1:0] sizes;
  logic [31:0] negatives, nans;
  generate
    for (i = 0; i < 32; i = i + 1) begin : g_lane
      centre_lane centre (
          .clk(clk),
          .key(key2[i*16+:16]),
          .exponent(statistics[i*32+24+:6]),
          .mean(statistics[i*32+:24]),
          .size(sizes[i*24+:24]),
          .negative(negatives[i]),
          .nan(nans[i])
      );
    end
  endgenerate

  // Bit length of the largest is that of all, or-ed. Sizes are there 8 cycles after acceptance.
  logic [2*4*24-1:0] fours;
  logic [2*24-1:0] ored;
  logic [1:0] nan_half, nan_late;
  always_ff @(posedge clk) begin
    for (int j = 0; j < 8; j = j + 1) begin
      fours[j*24+:24] <= sizes[j*96+:24] | sizes[j*96+24+:24] | sizes[j*96+48+:24]
          | sizes[j*96+72+:24];
    end
    for (int j = 0; j < 2; j = j + 1) begin
      ored[j*24+:24] <= fours[j*96+:24] | fours[j*96+24+:24] | fours[j*96+48+:24]
          | fours[j*96+72+:24];
      nan_half[j] <= |nans[j*16+:16];
    end
  end
  delay_line #(
      .WIDTH (2),
      .CYCLES(5)
  ) nan_line (
      .clk(clk),
      .in (nan_half),
      .out(nan_late)
  );

  logic valid8, valid10, valid11, first10, last10, split10, spare10;
  pulse_line #(
      .CYCLES(8)
  ) line8 (
      .clk(clk),
      .rst(rst),
      .in (in_accept),
      .out(valid8)
  );
  pulse_line #(
      .CYCLES(2)
  ) line10 (
      .clk(clk),
      .rst(rst),
      .in (valid8),
      .out(valid10)
  );
  delay_line #(
      .WIDTH (4),
      .CYCLES(10)
  ) flags10 (
      .clk(clk),
      .in ({in_first, in_last, in_split, in_spare}),
      .out({first10, last10, split10, spare10})
  );

  logic [24:0] all, opening;  // with NaN on top
  logic after_split, ends11, wait11;
  always_ff @(posedge clk) begin
    if (valid10) begin
      all <= (first10 ? 25'd0 : after_split ? opening : all) | {nan_late[0], ored[23:0]}
          | (split10 ? 25'd0 : {nan_late[1], ored[47:24]});
      opening <= {nan_late[1], ored[47:24]};
      after_split <= split10;
    end
    ends11 <= valid10 && last10;
    // The high slice of a split beat waits for its own head.
    wait11 <= split10 && !spare10;
    valid11 <= valid10 && !rst;
    if (rst) ends11 <= 1'b0;
  end

  function automatic logic [4:0] bit_length(input logic [23-SHIFT:0] value);
    bit_length = 5'd0;
    for (int j = 0; j < 24 - SHIFT; j = j + 1) if (value[j]) bit_length = 5'(j + 1);
  endfunction

  logic [5:0] exponent12;
  logic ends12;
  logic [4:0] heads_in, heads_out;
  logic [4:0] waiting;    // beats whose heads are not complete
  logic [5:0] ready;      // beats that may leave
  logic [4:0] released;
  always_ff @(posedge clk) begin
    exponent12 <= {all[24], bit_length(all[23:SHIFT])};
    if (rst) begin
      ends12 <= 1'b0;
      heads_in <= '0;
      heads_out <= '0;
      waiting <= '0;
      released <= '0;
      ready <= '0;
    end else begin
      ends12 <= ends11;
      if (ends12) heads_in <= heads_in + 1'b1;
      if (valid11) waiting <= ends11 ? 5'(wait11) : waiting + 1'b1;
      released <= ends11 ? waiting + 5'(!wait11) : 5'd0;
      ready <= ready + 6'(released) - 6'(beat);
      if (beat && last) heads_out <= heads_out + 1'b1;
    end
  end

  // Out: the same order of beats again.
  logic out_active, queue_valid, queue_ready;
  logic [29:0] queue_data;
  logic unused_room;
  credit_fifo #(
      .WIDTH(30),
      .DEPTH(4)
  ) segments (
      .clk(clk),
      .rst(rst),
      .take_credit(next_valid && next_ready),
      .available(unused_room),
      .in_valid(next_valid && next_ready),
      .in_data({next_tokens, next_row, next_slot}),
      .out_valid(queue_valid),
      .out_ready(queue_ready),
      .out_data(queue_data)
  );
  assign beat = out_active && room && ready != 0;
  row_sequencer #(
      .SLICES(SLICES),
      .KV(KV)
  ) leaving (
      .clk(clk),
      .rst(rst),
      .next_valid(queue_valid),
      .next_ready(queue_ready),
      .next_tokens(queue_data[29:13]),
      .next_row(queue_data[12:1]),
      .next_slot(queue_data[0]),
      .active(out_active),
      .accept(beat),
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
      .position_row(position_row),
      .row_last(row_last)
  );

  // A beat takes its room when it is accepted and gives it back when it leaves.
  logic [5:0] space;
  logic [4:0] written, read;
  always_ff @(posedge clk) begin
    if (rst) begin
      space <= 6'(DEPTH);
      in_room <= 1'b0;
      written <= '0;
      read <= '0;
    end else begin
      space <= space - 6'(in_accept) + 6'(beat);
      in_room <= space > 2;
      if (valid8) written <= written + 1'b1;
      if (beat) read <= read + 1'b1;
    end
  end

  logic [799:0] held, leaving1;
  ram_lut #(
      .WIDTH(800),
      .DEPTH(DEPTH)
  ) distances (
      .clk(clk),
      .write_enable(valid8),
      .write_address(written),
      .write_data({negatives, sizes}),
      .read_address(read),
      .read_data(held)
  );
  logic [5:0] low_read, high_read, low1, high1;
  ram_lut #(
      .WIDTH(6),
      .DEPTH(DEPTH)
  ) low_exponents (
      .clk(clk),
      .write_enable(ends12),
      .write_address(heads_in),
      .write_data(exponent12),
      .read_address(heads_out),
      .read_data(low_read)
  );
  generate
    if (SLICES % 2 == 1) begin : g_two_heads
      ram_lut #(
          .WIDTH(6),
          .DEPTH(DEPTH)
      ) high_exponents (
          .clk(clk),
          .write_enable(ends12),
          .write_address(heads_in),
          .write_data(exponent12),
          .read_address(heads_out + 5'(split)),
          .read_data(high_read)
      );
    end else begin : g_one_head
      assign high_read = low_read;
    end
  endgenerate
  always_ff @(posedge clk) begin
    leaving1 <= held;
    low1 <= low_read;
    high1 <= high_read;
  end
  assign low_exponent = low1[5] ? 8'd255 : {3'd0, low1[4:0]};
  generate
    for (i = 0; i < 32; i = i + 1) begin : g_code
      round_lane #(
          .CODE_BITS(CODE_BITS)
      ) rounded (
          .clk(clk),
          .size(leaving1[i*24+:24]),
          .negative(leaving1[768+i]),
          .exponent(i < 16 ? low1[4:0] : high1[4:0]),
          .invalid(i < 16 ? low1[5] : high1[5]),
          .code(codes[i*CODE_BITS+:CODE_BITS])
      );
    end
  endgenerate
endmodule
