// SPDX-License-Identifier: Apache-2.0
// Goes before the `endmodule` of axi_write.sv, where it sees the registers. Addresses, lengths,
// handshakes and counts, at the sizes of the kernels and for ever. What the queue and the FIFO
// inside promise is proved about them alone (fifo_inside.sv) and assumed here.
    logic running = 1'b0;
    always @(posedge clk) running <= 1'b1;
    always @(*) assume (rst == !running);

    // Bursts that wait; on the bus: address taken; last beat taken, not answered.
    logic [TOTAL-1:0] waiting, accepted, finished;
    logic [STEP-1:0] whole, beats_sent;  // beats less one of the burst on the bus; beats sent
    logic aw_waited, w_waited, word_waited, word_last;
    logic [ADDRESS-1:0] address;
    logic [7:0] burst;
    logic [DATA-1:0] word;
    logic [BEAT-1:0] newest, pushed_start;
    logic [STEP-1:0] pushed_length;
    assign newest = follows - 1'b1;
    assign pushed_start = (at_once && !joins) ? in_beat : start;
    assign pushed_length = !at_once ? length : joins ? length + 1'b1 : {STEP{1'b0}};
    always @(*) begin
        // A response answers a burst whose address and last beat were taken.
        if (bvalid) assume (accepted != 0 && finished != 0);
        // Of the queue of closed bursts: room, order of magnitude, and what was put in comes out.
        assume (closed_ready == (waiting < CLOSED));
        if (burst_valid) assume (waiting != 0
            && {1'b0, burst_start[STEP-1:0]} + burst_length < BURST);
        // Of the FIFO: a word that waits stays.
        if (running && word_waited) assume (word_valid && wdata == word);
    end
    always @(posedge clk) begin
        if (rst) begin
            {waiting, accepted, finished, beats_sent} <= '0;
            {aw_waited, w_waited, word_waited} <= '0;
        end else begin
            waiting <= waiting + push - (burst_valid && burst_ready);
            accepted <= accepted + (awvalid && awready) - done_valid;
            finished <= finished + (wvalid && wready && wlast) - done_valid;
            if (burst_valid && burst_ready) begin
                whole <= burst_length;
                beats_sent <= 0;
            end else if (wvalid && wready) beats_sent <= beats_sent + 1'b1;
            aw_waited <= awvalid && !awready;
            w_waited <= wvalid && !wready;
            word_waited <= word_valid && !word_ready;
            address <= awaddr;
            burst <= awlen;
            word <= wdata;
            word_last <= wlast;
        end
        if (running) begin
            if (aw_waited) aw_stays: assert (awvalid && awaddr == address && awlen == burst);
            if (w_waited) w_stays: assert (wvalid && wdata == word && wlast == word_last);
            if (awvalid) begin
                no_page_crossed: assert (awaddr[ADDRESS-1:SHIFT+STEP]
                    == (awaddr + (awlen << SHIFT)) >> (SHIFT + STEP));
                no_long_burst: assert (awlen < BURST);
            end
            if (wvalid) wlast_ends_the_burst: assert (wlast == (beats_sent == whole));
            if (take && joins) marked_beat_ends_its_burst: assert (!marked);
            if (push)
                closed_bursts_fit: assert ({1'b0, pushed_start[STEP-1:0]} + pushed_length < BURST);
            not_too_many_open: assert (accepted <= OUTSTANDING);
            always_ready: assert (bready);
            if (!busy) all_answered: assert (!open && waiting == 0 && accepted == 0 && !awvalid);

            invariant_total: assert (total == waiting + bursts && waiting <= CLOSED);
            invariant_bursts: assert (bursts == accepted + awvalid && bursts <= OUTSTANDING);
            invariant_finished: assert (bursts == finished + sending);
            if (sending) invariant_left: assert ({1'b0, beats_sent} + left == whole);
            if (open) begin
                invariant_open: assert (newest == start + length
                    && {1'b0, start[STEP-1:0]} + length < BURST);
                if (!closing) invariant_not_ended: assert (!marked && follows[STEP-1:0] != 0);
            end
            if (closing) invariant_closing: assert (open);
            a_burst_is_answered: cover (finished == 1 && done_valid);
        end
    end
