// SPDX-License-Identifier: Apache-2.0
// The aligned product is the contract's definition (section 5) in wide integers, for all inputs.
module prove_align (
    input logic clk,
    input logic signed [22:0] product,
    input logic signed [7:0] query_exponent,
    input logic [7:0] token_exponent,
    input logic signed [31:0] addend
);
  logic signed [32:0] aligned;
  logic signed [23:0] limited, limited0;
  logic signed [47:0] wide, shifted;
  logic signed [10:0] whole_shift, shift;
  logic signed [32:0] expected;
  logic [3:0] step = 0;
  align_unit dut (.*);
  always_comb begin
    whole_shift = 11'(query_exponent) + $signed({3'd0, token_exponent}) - 11'sd6;
    shift = (whole_shift > 24) ? 11'sd24 : (whole_shift < -24) ? -11'sd24 : whole_shift;
    wide = 48'(product);
    if (shift >= 0) shifted = wide <<< shift[4:0];
    else shifted = (wide + (48'sd1 <<< (-shift - 11'sd1))) >>> -shift;
    if (shifted > 8388607) limited = 24'sd8388607;
    else if (shifted < -8388607) limited = -24'sd8388607;
    else limited = shifted[23:0];
  end
  always_ff @(posedge clk) begin
    // What the kernel can meet: |P| < 2^22.
    if (step == 0) assume (product[22] == product[21]);
    if (step == 0) limited0 <= limited;
    if (step == 6) expected <= 33'(limited0) + 33'(addend);
    step <= step + 1'b1;
    if (step == 7) assert (aligned == expected);
  end
endmodule
