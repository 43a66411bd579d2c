// SPDX-License-Identifier: Apache-2.0
// A larger sum never has a smaller score code, a valid code is not 0, an invalid one is.
module prove_monotone #(
    parameter int RULE = 1,
    parameter int WIDTH = 57
) (
    input logic clk,
    input logic [WIDTH-1:0] smaller,
    input logic [WIDTH-1:0] larger
);
  logic [15:0] smaller_code, larger_code, invalid_code;
  logic [3:0] step = 0;
  score_code #(.RULE(RULE), .WIDTH(WIDTH)) first (
      .clk(clk), .value(smaller), .invalid(1'b0), .code(smaller_code));
  score_code #(.RULE(RULE), .WIDTH(WIDTH)) second (
      .clk(clk), .value(larger), .invalid(1'b0), .code(larger_code));
  score_code #(.RULE(RULE), .WIDTH(WIDTH)) third (
      .clk(clk), .value(larger), .invalid(1'b1), .code(invalid_code));
  always_ff @(posedge clk) begin
    if (step == 0) begin
      if (RULE != 0) assume (smaller <= larger);
      else assume ($signed(smaller) <= $signed(larger));
    end
    step <= step + 1'b1;
    if (step == 5) begin
      assert (smaller_code <= larger_code);
      assert (smaller_code != 0);
      assert (invalid_code == 0);
    end
  end
endmodule
