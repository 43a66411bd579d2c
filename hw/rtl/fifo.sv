// SPDX-License-Identifier: Apache-2.0
// First in, first out. The memory is read through an output register, so deep ones become block
// RAM; a word is visible two cycles after it was written. Holds DEPTH + 1 words.
module fifo #(
    parameter int WIDTH = 8,
    parameter int DEPTH = 16  // a power of two
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
    logic take;

    assign held = written - taken;
    assign in_ready = held != FULL;
    assign take = (held != 0) && (!out_valid || out_ready);

    always_ff @(posedge clk) begin
        if (in_valid && in_ready) memory[written[BITS-1:0]] <= in_data;
        if (take) out_data <= memory[taken[BITS-1:0]];
    end

    always_ff @(posedge clk) begin
        if (rst) begin
            written <= '0;
            taken <= '0;
            out_valid <= 1'b0;
        end else begin
            if (in_valid && in_ready) written <= written + 1'b1;
            if (take) taken <= taken + 1'b1;
            if (take) out_valid <= 1'b1;
            else if (out_ready) out_valid <= 1'b0;
        end
    end
endmodule
