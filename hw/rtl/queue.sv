// SPDX-License-Identifier: Apache-2.0
// First in, first out, for few words: LUT RAM read without a register, so a word is visible in the
// cycle after it was written.
module queue #(
    parameter int WIDTH = 8,
    parameter int DEPTH = 4  // a power of two
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             in_valid,
    output logic             in_ready,
    input  logic [WIDTH-1:0] in_data,
    output logic             out_valid,
    input  logic             out_ready,
    output logic [WIDTH-1:0] out_data
);
    localparam int BITS = $clog2(DEPTH);
    localparam logic [BITS:0] FULL = DEPTH;

    logic [WIDTH-1:0] memory [0:DEPTH-1];
    logic [BITS:0] written, taken, held;

    assign held = written - taken;
    assign in_ready = held != FULL;
    assign out_valid = held != 0;
    assign out_data = memory[taken[BITS-1:0]];

    always_ff @(posedge clk) if (in_valid && in_ready) memory[written[BITS-1:0]] <= in_data;

    always_ff @(posedge clk) begin
        if (rst) begin
            written <= '0;
            taken <= '0;
        end else begin
            if (in_valid && in_ready) written <= written + 1'b1;
            if (out_valid && out_ready) taken <= taken + 1'b1;
        end
    end
endmodule
