// SPDX-License-Identifier: Apache-2.0
// Adds two packed sums, low + high * 2^18, field by field. Latency 1.
module pair_fields (
    input  logic               clk,
    input  logic        [35:0] first,
    input  logic        [35:0] second,
    output logic signed [18:0] low,
    output logic signed [18:0] high
);
  wire signed [17:0] low0 = first[17:0];
  wire signed [17:0] low1 = second[17:0];
  wire signed [17:0] high0 = first[35:18];
  wire signed [17:0] high1 = second[35:18];
  always_ff @(posedge clk) begin
    low  <= 19'(low0) + 19'(low1);
    // What a negative low field borrowed comes back.
    high <= 19'(high0) + 19'(high1) + {18'd0, low0[17]} + {18'd0, low1[17]};
  end
endmodule
