// SPDX-License-Identifier: Apache-2.0
// Small memory of LUTs: written with the clock, read at once.
module ram_lut #(
    parameter int WIDTH = 16,
    parameter int DEPTH = 32,
    parameter int ADDRESS_BITS = (DEPTH > 1) ? $clog2(DEPTH) : 1
) (
    input  logic                    clk,
    input  logic                    write_enable,
    input  logic [ADDRESS_BITS-1:0] write_address,
    input  logic [       WIDTH-1:0] write_data,
    input  logic [ADDRESS_BITS-1:0] read_address,
    output logic [       WIDTH-1:0] read_data
);
  (* ram_style = "distributed" *)logic [WIDTH-1:0] memory[0:DEPTH-1];
  always_ff @(posedge clk) if (write_enable) memory[write_address] <= write_data;
  assign read_data = memory[read_address];
endmodule
