// SPDX-License-Identifier: Apache-2.0
// A word, CYCLES clocks later. Without reset, so that tools may build it from shift registers.
module delay_line #(
    parameter int WIDTH  = 1,
    parameter int CYCLES = 1
) (
    input  logic             clk,
    input  logic [WIDTH-1:0] in,
    output logic [WIDTH-1:0] out
);
  generate
    if (CYCLES == 0) begin : g_wire
      assign out = in;
    end else if (CYCLES == 1) begin : g_one
      always_ff @(posedge clk) out <= in;
    end else begin : g_line
      logic [CYCLES*WIDTH-1:0] line;
      always_ff @(posedge clk) line <= {line[(CYCLES-1)*WIDTH-1:0], in};
      assign out = line[CYCLES*WIDTH-1-:WIDTH];
    end
  endgenerate
endmodule
