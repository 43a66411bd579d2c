// SPDX-License-Identifier: Apache-2.0
// Two products from one multiplier: (low + high * 2^18) * b. Latency 4.
module pair_product #(
    parameter int PAIRED = 1,  // 0: low * b only
    parameter int WIDTH  = (PAIRED != 0) ? 36 : 19
) (
    input  logic                    clk,
    input  logic signed [      7:0] low,
    input  logic signed [      7:0] high,
    input  logic signed [      7:0] b,
    output logic signed [WIDTH-1:0] product
);
  localparam int AW = (PAIRED != 0) ? 27 : 8;
  logic signed [AW-1:0] left, left_again;
  logic signed [7:0] right, right_again;
  logic signed [AW+7:0] whole;
  always_ff @(posedge clk) begin
    if (PAIRED != 0) begin
      // A negative low field borrows one from the high field.
      left <= {{high[7], high} - {8'd0, low[7]}, {10{low[7]}}, low};
    end else begin
      left <= low;
    end
    right <= b;
    left_again <= left;
    right_again <= right;
    whole <= left_again * right_again;
    product <= WIDTH'(whole);
  end
endmodule
