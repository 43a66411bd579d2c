// SPDX-License-Identifier: Apache-2.0
// The parts side by side behind one word, for the simulation that compares them with golden.
module parts #(
    parameter int HEADS    = 2,
    parameter int CHANNELS = 16,
    parameter int SUMS     = HEADS * CHANNELS * 25
) (
    input  logic           clk,
    input  logic [  383:0] in,
    output logic [2047:0] out
);
  assign out[2047:160+2*SUMS] = '0;
  assign out[95:65] = '0;
  coded_weight weigh (
      .clk(clk),
      .aligned(in[31:0]),
      .reference(in[48:32]),
      .exponent(in[68:64]),
      .top(in[79:72]),
      .place(out[7:0]),
      .live(out[8]),
      .term(out[49:9]),
      .addend(out[64:50])
  );
  block_output finish (
      .clk(clk),
      .weight(in[119:96]),
      .weight_power(in[124:120]),
      .mean(in[152:128]),
      .sum(in[184:160]),
      .top(in[199:192]),
      .channel_exponent(in[207:200]),
      .out(out[127:96])
  );
  moved_sum merge (
      .clk(clk),
      .running(in[255:224]),
      .block(in[287:256]),
      .below(in[213:208]),
      .out(out[159:128])
  );
  genvar style;
  generate
    for (style = 0; style < 2; style = style + 1) begin : g_style
      value_sums #(
          .HEADS(HEADS),
          .CHANNELS(CHANNELS),
          .STYLE(style)
      ) sums (
          .clk(clk),
          .valid(in[216]),
          .first(in[217]),
          .addends(in[288+:HEADS*15]),
          .codes(in[320+:CHANNELS*4]),
          .sums(out[160+style*SUMS+:SUMS])
      );
    end
  endgenerate
endmodule
