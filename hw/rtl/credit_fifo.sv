// SPDX-License-Identifier: Apache-2.0
// FIFO whose writer never waits: it takes a credit, long before, for each word it will write.
// `available` falls while a credit may still be taken this cycle and the next.
module credit_fifo #(
    parameter int WIDTH = 64,
    parameter int DEPTH = 32
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             take_credit,
    output logic             available,
    input  logic             in_valid,
    input  logic [WIDTH-1:0] in_data,
    output logic             out_valid,
    input  logic             out_ready,
    output logic [WIDTH-1:0] out_data
);
  localparam int AB = $clog2(DEPTH);
  logic [AB:0] written, read, credits;
  logic [WIDTH-1:0] head;
  logic pop;

  ram_lut #(
      .WIDTH(WIDTH),
      .DEPTH(DEPTH)
  ) words (
      .clk(clk),
      .write_enable(in_valid),
      .write_address(written[AB-1:0]),
      .write_data(in_data),
      .read_address(read[AB-1:0]),
      .read_data(head)
  );
  assign pop = (written != read) && (!out_valid || out_ready);

  always_ff @(posedge clk) begin
    if (pop) out_data <= head;
    if (rst) begin
      written <= '0;
      read <= '0;
      credits <= DEPTH[AB:0];
      available <= 1'b0;
      out_valid <= 1'b0;
    end else begin
      if (in_valid) written <= written + 1'b1;
      if (pop) read <= read + 1'b1;
      if (take_credit && !pop) credits <= credits - 1'b1;
      else if (pop && !take_credit) credits <= credits + 1'b1;
      available <= credits > 2;
      if (pop) out_valid <= 1'b1;
      else if (out_ready) out_valid <= 1'b0;
    end
  end
endmodule
