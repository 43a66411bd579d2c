// SPDX-License-Identifier: Apache-2.0
// A valid bit, CYCLES clocks later; a reset clears what is on its way.
module pulse_line #(
    parameter int CYCLES = 4
) (
    input  logic clk,
    input  logic rst,
    input  logic in,
    output logic out
);
  logic [CYCLES:0] line;
  always_ff @(posedge clk) begin
    if (rst) line <= '0;
    else line <= {line[CYCLES-1:0], in};
  end
  assign out = line[CYCLES-1];
endmodule
