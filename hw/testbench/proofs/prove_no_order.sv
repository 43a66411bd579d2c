// SPDX-License-Identifier: Apache-2.0
// Saturating once, at the end, is saturating at every addition: code(x + w) is the code of
// min(min(x, limit) + w, limit). Plain sums have no order, so the saturating sum has none.
module prove_no_order (
    input logic clk,
    input logic [55:0] sum,
    input logic [47:0] weight
);
  logic [15:0] once, each;
  logic [3:0] step = 0;
  localparam logic [56:0] LIMIT = 57'hFFFF_FFFF_FFFF;
  wire [56:0] limited = (sum > LIMIT) ? LIMIT : {1'b0, sum};
  wire [56:0] added = limited + {9'd0, weight};
  wire [56:0] again = (added > LIMIT) ? LIMIT : added;
  score_code #(.RULE(1), .WIDTH(57)) first (
      .clk(clk), .value({1'b0, sum} + {9'd0, weight}), .invalid(1'b0), .code(once));
  score_code #(.RULE(1), .WIDTH(57)) second (
      .clk(clk), .value(again), .invalid(1'b0), .code(each));
  always_ff @(posedge clk) begin
    step <= step + 1'b1;
    if (step == 5) assert (once == each);
  end
endmodule
