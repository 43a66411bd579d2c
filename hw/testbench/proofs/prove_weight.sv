// SPDX-License-Identifier: Apache-2.0
// The weight is the contract's definition (section 7), for all 33-bit log weights.
module prove_weight (
    input logic clk,
    input logic signed [32:0] log_weight
);
  logic [47:0] weight, defined, expected;
  logic [3:0] step = 0;
  wire signed [24:0] i = log_weight[32:8];
  wire [47:0] mantissa = {39'd0, 1'b1, log_weight[7:0]};
  wire signed [24:0] left = i + 25'sd16;
  wire live = 1'b1;
  weight_unit dut (.*);
  always_comb begin
    if (i >= 24) defined = '1;
    else if (i >= -16) defined = mantissa << left[5:0];
    else if (i >= -80) defined = mantissa >> (-left);
    else defined = '0;
  end
  always_ff @(posedge clk) begin
    if (step == 0) expected <= defined;
    step <= step + 1'b1;
    if (step == 4) assert (weight == expected);
  end
endmodule
