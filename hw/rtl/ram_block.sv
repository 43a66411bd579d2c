// SPDX-License-Identifier: Apache-2.0
// Block RAM, one write and one read port, read latency 2 (the second register is the RAM's own).
// A word is written in LANES parts. Nobody reads an address in the cycle it is written.
module ram_block #(
    parameter int WIDTH = 512,
    parameter int DEPTH = 64,
    parameter int LANES = 1,
    parameter int ADDRESS_BITS = $clog2(DEPTH)
) (
    input  logic                    clk,
    input  logic [       LANES-1:0] write_enable,
    input  logic [ADDRESS_BITS-1:0] write_address,
    input  logic [       WIDTH-1:0] write_data,
    input  logic                    read_enable,
    input  logic [ADDRESS_BITS-1:0] read_address,
    output logic [       WIDTH-1:0] read_data
);
  localparam int LANE = WIDTH / LANES;
  (* ram_style = "block", no_rw_check *)logic [WIDTH-1:0] memory[0:DEPTH-1];
  logic [WIDTH-1:0] first;
  always_ff @(posedge clk) begin
    for (int lane = 0; lane < LANES; lane = lane + 1) begin
      if (write_enable[lane]) begin
        memory[write_address][lane*LANE+:LANE] <= write_data[lane*LANE+:LANE];
      end
    end
  end
  always_ff @(posedge clk) begin
    if (read_enable) begin
      first <= memory[read_address];
      read_data <= first;
    end
  end
endmodule
