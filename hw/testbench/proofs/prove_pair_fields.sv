// SPDX-License-Identifier: Apache-2.0
// Packed sums of eight products come apart exactly, for all sums that 8-bit key codes and query
// codes of at most BOUND can make. (A sum of packed words is the packed word of the sums, whatever
// their number: addition is exact modulo 2^36.)
module prove_pair_fields #(
    parameter int BOUND = 127
) (
    input logic clk,
    input logic signed [19:0] low0,
    input logic signed [19:0] high0,
    input logic signed [19:0] low1,
    input logic signed [19:0] high1
);
  logic signed [18:0] low, high;
  logic signed [19:0] low_expected, high_expected;
  logic [3:0] step = 0;
  wire [35:0] first = 36'(low0) + (36'(high0) <<< 18);
  wire [35:0] second = 36'(low1) + (36'(high1) <<< 18);
  localparam int LIMIT = 8 * 128 * BOUND;
  pair_fields dut (.*);
  always_ff @(posedge clk) begin
    if (step == 0) begin
      assume (low0 <= LIMIT && low0 >= -LIMIT && low1 <= LIMIT && low1 >= -LIMIT);
      assume (high0 <= LIMIT && high0 >= -LIMIT && high1 <= LIMIT && high1 >= -LIMIT);
      low_expected  <= low0 + low1;
      high_expected <= high0 + high1;
    end
    step <= step + 1'b1;
    if (step == 1) begin
      assert (20'(low) == low_expected);
      assert (20'(high) == high_expected);
    end
  end
endmodule
