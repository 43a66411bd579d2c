// SPDX-License-Identifier: Apache-2.0
// Both fields of 16 packed products come apart as the sums of both, for all products that
// |b| <= BOUND and 8-bit codes can make.
module prove_pair_sum #(
    parameter int BOUND = 127
) (
    input logic clk,
    input logic [255:0] low_products,
    input logic [255:0] high_products
);
  logic [16*36-1:0] products;
  logic signed [18:0] low, high, low_expected, high_expected, low_sum, high_sum;
  logic [3:0] step = 0;
  logic in_bounds;
  pair_sum dut (.*);
  always_comb begin
    in_bounds = 1'b1;
    low_sum = 19'd0;
    high_sum = 19'd0;
    for (int i = 0; i < 16; i = i + 1) begin
      products[i*36+:36] = 36'($signed(low_products[i*16+:16]))
          + (36'($signed(high_products[i*16+:16])) <<< 18);
      low_sum = low_sum + 19'($signed(low_products[i*16+:16]));
      high_sum = high_sum + 19'($signed(high_products[i*16+:16]));
      if ($signed(low_products[i*16+:16]) > 128 * BOUND) in_bounds = 1'b0;
      if ($signed(low_products[i*16+:16]) < -128 * BOUND) in_bounds = 1'b0;
      if ($signed(high_products[i*16+:16]) > 128 * BOUND) in_bounds = 1'b0;
      if ($signed(high_products[i*16+:16]) < -128 * BOUND) in_bounds = 1'b0;
    end
  end
  always_ff @(posedge clk) begin
    if (step == 0) begin
      assume (in_bounds);
      low_expected  <= low_sum;
      high_expected <= high_sum;
    end
    step <= step + 1'b1;
    if (step == 4) begin
      assert (low == low_expected);
      assert (high == high_expected);
    end
  end
endmodule
