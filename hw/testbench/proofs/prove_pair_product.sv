// SPDX-License-Identifier: Apache-2.0
// One multiplier gives both products, for all operands.
module prove_pair_product (
    input logic clk,
    input logic signed [7:0] low,
    input logic signed [7:0] high,
    input logic signed [7:0] b
);
  logic signed [35:0] product, expected;
  logic [3:0] step = 0;
  wire signed [15:0] low_product = low * b;
  wire signed [15:0] high_product = high * b;
  pair_product dut (.*);
  always_ff @(posedge clk) begin
    if (step == 0) expected <= 36'(low_product) + (36'(high_product) <<< 18);
    step <= step + 1'b1;
    if (step == 4) assert (product == expected);
  end
endmodule
