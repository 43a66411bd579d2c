// SPDX-License-Identifier: Apache-2.0
// The FIFO: what comes out is what went in, each word once and in order; a word that waits stays.
module fifo_formal #(
    parameter int DEPTH = 4,
    parameter int SHORT = 0  // 1: the queue without an output register
) (
    input logic       clk,
    input logic       in_valid,
    input logic [3:0] in_data,
    input logic       out_ready
);
    logic rst = 1'b1;
    always @(posedge clk) rst <= 1'b0;

    logic in_ready, out_valid;
    logic [3:0] out_data;
    generate
        if (SHORT) begin : g_queue
            queue #(.WIDTH(4), .DEPTH(DEPTH)) dut (.*);
        end else begin : g_fifo
            fifo #(.WIDTH(4), .DEPTH(DEPTH)) dut (.*);
        end
    endgenerate

    // Any one word, by its number.
    (* anyconst *) logic [4:0] watched;
    logic [4:0] put = 0, got = 0;
    logic [3:0] word;
    logic waited = 1'b0;
    logic [3:0] waiting;
    always @(posedge clk) begin
        if (!rst) begin
            if (in_valid && in_ready) put <= put + 5'd1;
            if (in_valid && in_ready && put == watched) word <= in_data;
            if (out_valid && out_ready) got <= got + 5'd1;
            waited <= out_valid && !out_ready;
            waiting <= out_data;
            if (out_valid) nothing_comes_from_nowhere: assert (got != put);
            if (out_valid && got == watched) no_word_changed: assert (out_data == word);
            never_overflows: assert (put - got <= DEPTH + 1 - SHORT);
            if (waited) valid_stays: assert (out_valid && out_data == waiting);
            if (put - got < DEPTH) takes_while_there_is_room: assert (in_ready);
            full_and_empty_again: cover (got == DEPTH + 3);
        end
    end
endmodule
