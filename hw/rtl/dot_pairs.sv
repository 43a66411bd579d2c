// SPDX-License-Identifier: Apache-2.0
// Two inner products of 16 channels from 16 multipliers: two factors share one word against a
// third. Latency 8.
module dot_pairs #(
    parameter int PAIRED = 1  // 0: a_high and high are not used
) (
    input  logic                clk,
    input  logic        [127:0] a_low,
    input  logic        [127:0] a_high,
    input  logic        [127:0] b,
    output logic signed [ 18:0] low,
    output logic signed [ 18:0] high
);
  localparam int WIDTH = (PAIRED != 0) ? 36 : 19;
  logic [16*WIDTH-1:0] products;
  genvar i;
  generate
    for (i = 0; i < 16; i = i + 1) begin : g_product
      pair_product #(
          .PAIRED(PAIRED)
      ) multiply (
          .clk(clk),
          .low(a_low[i*8+:8]),
          .high(a_high[i*8+:8]),
          .b(b[i*8+:8]),
          .product(products[i*WIDTH+:WIDTH])
      );
    end
  endgenerate
  pair_sum #(
      .PAIRED(PAIRED)
  ) sums (
      .clk(clk),
      .products(products),
      .low(low),
      .high(high)
  );
endmodule
