// SPDX-License-Identifier: Apache-2.0
// Gathers the score codes of 16 consecutive tokens, per KV head or once, and sends them on.
module tuple_rows #(
    parameter int LANES = 1,  // codes that come at once
    parameter int SETS = 8    // KV heads
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  take_credit,
    output logic                  credit_available,
    input  logic                  in_valid,
    input  logic [  LANES*16-1:0] in_codes,
    input  logic [           3:0] in_token,          // of the first code, within its 16
    input  logic [           5:0] in_set,
    input  logic                  in_complete,       // the last codes of the row and set
    input  logic [          11:0] in_row,
    input  logic [           3:0] in_row_last,       // last token of the row
    input  logic                  in_segment_last,
    output logic                  out_valid,
    input  logic                  out_ready,
    output logic [         511:0] out_data,
    output logic [           5:0] out_head,
    output logic                  out_last
);
  localparam int SB = (SETS > 1) ? $clog2(SETS) : 1;
  localparam int WIDTH = 256 + 12 + 4 + 6 + 1;
  logic [255:0] row_codes, sent_codes;
  logic complete1, complete2, last1, last2;
  logic [5:0] set1, set2;
  logic [11:0] row1, row2, sent_row;
  logic [3:0] end1, end2, sent_end;
  logic [255:0] codes2;

  genvar i;
  generate
    for (i = 0; i < 16; i = i + 1) begin : g_token
      ram_lut #(
          .WIDTH(16),
          .DEPTH(1 << SB)
      ) memory (
          .clk(clk),
          .write_enable(in_valid && 32'(in_token) / LANES == i / LANES),
          .write_address(in_set[SB-1:0]),
          .write_data(in_codes[(i%LANES)*16+:16]),
          .read_address(set1[SB-1:0]),
          .read_data(row_codes[i*16+:16])
      );
      // A spare tuple of the last beat is 0.
      always_ff @(posedge clk) begin
        if (i > 32'(end1)) codes2[i*16+:16] <= 16'd0;
        else codes2[i*16+:16] <= row_codes[i*16+:16];
      end
      assign out_data[i*32+:32] = (i > 32'(sent_end)) ? 32'd0
          : {sent_codes[i*16+:16], sent_row, 4'(i)};
    end
  endgenerate

  always_ff @(posedge clk) begin
    {set1, row1, end1, last1} <= {in_set, in_row, in_row_last, in_segment_last};
    {set2, row2, end2, last2} <= {set1, row1, end1, last1};
    if (rst) begin
      complete1 <= 1'b0;
      complete2 <= 1'b0;
    end else begin
      complete1 <= in_valid && in_complete;
      complete2 <= complete1;
    end
  end

  credit_fifo #(
      .WIDTH(WIDTH),
      .DEPTH(32)
  ) fifo (
      .clk(clk),
      .rst(rst),
      .take_credit(take_credit),
      .available(credit_available),
      .in_valid(complete2),
      .in_data({codes2, row2, end2, set2, last2}),
      .out_valid(out_valid),
      .out_ready(out_ready),
      .out_data({sent_codes, sent_row, sent_end, out_head, out_last})
  );
endmodule
