// SPDX-License-Identifier: Apache-2.0
// Goes before the `endmodule` of fifo.sv and of queue.sv, where it sees their registers. What comes
// out is what went in, each word once and in order; a word that waits stays. The invariants make
// the properties inductive: they hold for ever, not only for some cycles after reset.
    logic running = 1'b0;
    always @(posedge clk) running <= 1'b1;
    always @(*) assume (rst == !running);

    // Any one word, by its number.
    (* anyconst *) logic [BITS+1:0] watched;
    logic [BITS+1:0] put = 0, got = 0, inside, ahead, registered;
    logic [WIDTH-1:0] word, waiting;
    logic [BITS-1:0] place;
    logic waited = 1'b0;
    assign inside = put - got;
    assign ahead = watched - got;  // words that leave before it
`ifdef FIFO
    assign registered = out_valid;  // words that are not in the memory any more
`else
    assign registered = 0;
`endif
    assign place = taken[BITS-1:0] + ahead[BITS-1:0] - registered[BITS-1:0];
    always @(posedge clk) begin
        if (rst) begin
            put <= 0;
            got <= 0;
            waited <= 1'b0;
        end else begin
            if (in_valid && in_ready) put <= put + 1'b1;
            if (in_valid && in_ready && put == watched) word <= in_data;
            if (out_valid && out_ready) got <= got + 1'b1;
            waited <= out_valid && !out_ready;
            waiting <= out_data;
        end
        if (running) begin
            if (out_valid) nothing_comes_from_nowhere: assert (inside != 0);
            if (out_valid && got == watched) no_word_changed: assert (out_data == word);
`ifdef FIFO
            never_overflows: assert (inside <= DEPTH + 1);
`else
            never_overflows: assert (inside <= DEPTH);
`endif
            if (waited) valid_stays: assert (out_valid && out_data == waiting);
            if (inside < DEPTH) takes_while_there_is_room: assert (in_ready);

            invariant_count: assert (held <= DEPTH && inside == held + registered);
            invariant_numbers: assert (taken == got[BITS:0] + registered[BITS:0]);
            if (ahead < inside)
                invariant_place: assert ((ahead < registered ? out_data : memory[place]) == word);

            // Full and empty again, where that takes few cycles.
            words_pass: cover (got == ((DEPTH < 16) ? DEPTH + 3 : 1));
        end
    end
