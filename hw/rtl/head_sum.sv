// SPDX-License-Identifier: Apache-2.0
// Adds the slices of one KV head. HALVES 1: a slice per beat, latency 1. HALVES 2: two slices per
// beat, latency 2; with `split` the second one opens the next head.
module head_sum #(
    parameter int SUMS = 32,
    parameter int HALVES = 1
) (
    input  logic                      clk,
    input  logic                      valid,
    input  logic                      first,   // a head's first slice comes first in this beat
    input  logic                      split,
    input  logic [HALVES*SUMS*19-1:0] parts,
    output logic [       SUMS*23-1:0] totals
);
  genvar i;
  generate
    if (HALVES == 1) begin : g_one
      for (i = 0; i < SUMS; i = i + 1) begin : g_sum
        wire signed [18:0] part = parts[i*19+:19];
        logic signed [22:0] total;
        always_ff @(posedge clk) if (valid) total <= (first ? 23'sd0 : total) + 23'(part);
        assign totals[i*23+:23] = total;
      end
    end else begin : g_two
      logic valid1, first1, split1, after_split;
      always_ff @(posedge clk) begin
        {valid1, first1, split1} <= {valid, first, split};
        if (valid1) after_split <= split1;
      end
      for (i = 0; i < SUMS; i = i + 1) begin : g_sum
        wire signed [18:0] low = parts[i*19+:19];
        wire signed [18:0] high = parts[(SUMS+i)*19+:19];
        logic signed [19:0] both;
        logic signed [18:0] high1, opening;
        logic signed [22:0] total;
        always_ff @(posedge clk) begin
          both  <= 20'(low) + (split ? 20'sd0 : 20'(high));
          high1 <= high;
          if (valid1) begin
            opening <= high1;
            total <= (first1 ? 23'sd0 : after_split ? 23'(opening) : total) + 23'(both);
          end
        end
        assign totals[i*23+:23] = total;
      end
    end
  endgenerate
endmodule
