// SPDX-License-Identifier: Apache-2.0
// Turns codes of rows (a token after the other) into tiles and exponent beats (contract,
// section 9). Two tiles and two groups of exponents: one is written while the other is sent.
module tile_pack #(
    parameter int SLICES = 8,
    parameter int KV = 8,
    parameter int CODE_BITS = 4,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1,
    parameter int WORD_BITS = $clog2(KV * SLICES)
) (
    input  logic                    clk,
    input  logic                    rst,
    output logic                    room,
    // a beat of two slices, and 5 cycles later its codes, 1 cycle later the low head's exponent
    input  logic                    beat,
    input  logic                    last,
    input  logic [   HEAD_BITS-1:0] head,
    input  logic [   WORD_BITS-1:0] word,
    input  logic [             5:0] token,        // within its group
    input  logic                    row_start,
    input  logic                    row_done,
    input  logic                    segment_end,
    input  logic [             7:0] exponent,
    input  logic [32*CODE_BITS-1:0] codes,
    output logic                    out_valid,
    input  logic                    out_ready,
    output logic [           511:0] out_data,
    output logic [            31:0] out_beat,
    output logic                    out_last
);
  localparam int T = 32 / CODE_BITS;
  localparam int TB = $clog2(T);
  localparam int LANE = 16 * CODE_BITS;
  genvar h, i;

  // In: room for a whole tile (and group) is taken with its first beat.
  logic tile_start, group_start, tile_end, group_end, tile_sent, group_sent;
  logic [1:0] free_tiles, free_groups;
  logic write_tile, write_group;
  assign tile_start = row_start && token[TB-1:0] == 0;
  assign group_start = row_start && token == 0;
  assign tile_end = row_done && (segment_end || &token[TB-1:0]);
  assign group_end = row_done && (segment_end || &token);
  assign room = (!tile_start || free_tiles != 0) && (!group_start || free_groups != 0);
  always_ff @(posedge clk) begin
    if (rst) begin
      free_tiles <= 2'd2;
      free_groups <= 2'd2;
      write_tile <= 1'b0;
      write_group <= 1'b0;
    end else begin
      free_tiles <= free_tiles - 2'(beat && tile_start) + 2'(tile_sent);
      free_groups <= free_groups - 2'(beat && group_start) + 2'(group_sent);
      if (beat && tile_end) write_tile <= ~write_tile;
      if (beat && group_end) write_group <= ~write_group;
    end
  end

  logic beat1, last1, group1, beat5, end5, tile5;
  logic [HEAD_BITS-1:0] head1;
  logic [5:0] token1;
  logic [TB-1:0] lane5;
  logic [WORD_BITS-2:0] address5;
  logic group_end5, segment_end5;
  always_ff @(posedge clk) begin
    beat1 <= beat && !rst;
    {last1, group1, head1, token1} <= {last, write_group, head, token};
  end
  pulse_line #(
      .CYCLES(5)
  ) beat_line (
      .clk(clk),
      .rst(rst),
      .in (beat),
      .out(beat5)
  );
  delay_line #(
      .WIDTH (WORD_BITS + TB + 3),
      .CYCLES(5)
  ) flags_line (
      .clk(clk),
      .in ({tile_end, group_end, segment_end, write_tile, token[TB-1:0], word[WORD_BITS-1:1]}),
      .out({end5, group_end5, segment_end5, tile5, lane5, address5})
  );

  // The first token of a tile or group writes zeros behind itself: padding tokens are 0.
  logic [T-1:0] lane_write;
  logic [63:0] byte_write;
  always_comb begin
    for (int j = 0; j < T; j = j + 1) lane_write[j] = beat5 && (lane5 == 0 || 32'(lane5) == j);
    for (int j = 0; j < 64; j = j + 1) begin
      byte_write[j] = beat1 && last1 && (token1 == 0 || 32'(token1) == j);
    end
  end

  // Out: what is read next; every stage moves when the last one may.
  logic move, read_valid, read_exponents, read_tile, read_group, at_end;
  logic [WORD_BITS-1:0] read_word;
  logic [31:0] tile_beat, exponent_beat;
  logic [1:0] full, full_group_end, full_segment_end;
  logic tile_done, exponents_done;
  assign move = !out_valid || out_ready;
  assign read_valid = full[read_tile];
  assign tile_done = read_valid && !read_exponents && 32'(read_word) == KV * SLICES - 1;
  assign exponents_done = read_valid && read_exponents && 32'(read_word) == KV - 1;
  assign tile_sent = move && (exponents_done || (tile_done && !full_group_end[read_tile]));
  assign group_sent = move && exponents_done;
  always_ff @(posedge clk) begin
    if (rst) begin
      full <= 2'b00;
      read_tile <= 1'b0;
      read_group <= 1'b0;
      read_exponents <= 1'b0;
      read_word <= '0;
      tile_beat <= 32'(KV);
      exponent_beat <= '0;
    end else begin
      if (beat5 && end5) begin
        full[tile5] <= 1'b1;
        full_group_end[tile5] <= group_end5;
        full_segment_end[tile5] <= segment_end5;
      end
      if (move && read_valid) begin
        read_word <= (tile_done || exponents_done) ? '0 : read_word + 1'b1;
        if (!read_exponents) tile_beat <= tile_beat + 1'b1;
        else exponent_beat <= exponent_beat + 1'b1;
        if (tile_done) read_exponents <= full_group_end[read_tile];
        if (exponents_done) begin
          read_exponents <= 1'b0;
          read_group <= ~read_group;
          exponent_beat <= full_segment_end[read_tile] ? '0 : tile_beat;
          tile_beat <= full_segment_end[read_tile] ? 32'(KV) : tile_beat + 32'(KV);
        end
      end
      if (tile_sent) begin
        full[read_tile] <= 1'b0;
        read_tile <= ~read_tile;
      end
    end
  end

  logic [2*512-1:0] banks;
  logic [511:0] exponents;
  generate
    for (h = 0; h < 2; h = h + 1) begin : g_bank
      logic [511:0] written;
      for (i = 0; i < T; i = i + 1) begin : g_lane
        assign written[i*LANE+:LANE] = (32'(lane5) == i) ? codes[h*LANE+:LANE] : '0;
      end
      ram_block #(
          .WIDTH(512),
          .DEPTH(1 << WORD_BITS),
          .LANES(T)
      ) bank (
          .clk(clk),
          .write_enable(lane_write),
          .write_address({tile5, address5}),
          .write_data(written),
          .read_enable(move),
          .read_address({read_tile, read_word[WORD_BITS-1:1]}),
          .read_data(banks[h*512+:512])
      );
    end
  endgenerate
  logic [511:0] exponents_written;
  generate
    for (i = 0; i < 64; i = i + 1) begin : g_byte
      assign exponents_written[i*8+:8] = (32'(token1) == i) ? exponent : 8'd0;
    end
  endgenerate
  ram_block #(
      .WIDTH(512),
      .DEPTH(2 << HEAD_BITS),
      .LANES(64)
  ) group_exponents (
      .clk(clk),
      .write_enable(byte_write),
      .write_address({group1, head1}),
      .write_data(exponents_written),
      .read_enable(move),
      .read_address({read_group, read_word[HEAD_BITS-1:0]}),
      .read_data(exponents)
  );

  logic valid1, valid2, last_1, last_2;
  logic [1:0] from1, from2;  // even slice, odd slice, exponents
  logic [31:0] place1, place2;
  assign at_end = exponents_done && full_segment_end[read_tile];
  always_ff @(posedge clk) begin
    if (move) begin
      from1 <= {read_exponents, read_word[0]};
      place1 <= read_exponents ? exponent_beat : tile_beat;
      last_1 <= at_end;
      {from2, place2, last_2} <= {from1, place1, last_1};
      out_data <= from2[1] ? exponents : from2[0] ? banks[1023:512] : banks[511:0];
      out_beat <= place2;
      out_last <= last_2;
    end
    if (rst) begin
      valid1 <= 1'b0;
      valid2 <= 1'b0;
      out_valid <= 1'b0;
    end else if (move) begin
      valid1 <= read_valid;
      valid2 <= valid1;
      out_valid <= valid2;
    end
  end
endmodule
