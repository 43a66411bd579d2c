// SPDX-License-Identifier: Apache-2.0
// Goes before the `endmodule` of axi_write.sv, where it sees the registers. Addresses, lengths,
// handshakes, counts and room, at the sizes of the kernels and for ever. What the queue and the
// FIFO inside promise is proved about them alone (fifo_inside.sv) and assumed here.
    logic running = 1'b0;
    always @(posedge clk) running <= 1'b1;
    always @(*) assume (rst == !running);

    // Bursts that wait; on the bus: address taken; last beat taken, not answered.
    logic [TOTAL-1:0] waiting, accepted, finished;
    logic [ROOM:0] stored;               // words in the FIFO
    logic [STEP-1:0] whole, beats_sent;  // beats less one of the burst on the bus; beats sent
    logic aw_waited, w_waited, word_waited, word_last;
    logic [ADDRESS-1:0] address;
    logic [7:0] burst;
    logic [DATA-1:0] word;
    logic [BEAT-1:0] newest;             // beat of the open burst
    assign newest = start + length;
    always @(*) begin
        // A response answers a burst whose address and last beat were taken.
        if (bvalid) assume (accepted != 0 && finished != 0);
        // Of the queue of closed bursts: room, and what was put in comes out.
        assume (closed_ready == (waiting < CLOSED) && queued == (waiting != 0));
        if (queued) assume ({1'b0, front[1+TAG+STEP+:STEP]} + front[1+TAG+:STEP] < BURST);
        // Of the FIFO: it takes while there is room, gives what it holds, and a word stays.
        if (stored < DEPTH) assume (words_ready);
        if (word_valid) assume (stored != 0);
        if (running && word_waited) assume (word_valid && wdata == word);
    end
    always @(posedge clk) begin
        if (rst) begin
            {waiting, accepted, finished, stored, beats_sent} <= '0;
            {aw_waited, w_waited, word_waited} <= '0;
        end else begin
            waiting <= waiting + burst_waits - burst_leaves;
            accepted <= accepted + (awvalid && awready) - done_valid;
            finished <= finished + (wvalid && wready && wlast) - done_valid;
            stored <= stored + take - word_leaves;
            if (sends) begin
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
            if (moves && joins) marked_beat_ends_its_burst: assert (!marked);
            if (push)
                closed_bursts_fit: assert ({1'b0, pushed_start[STEP-1:0]} + pushed_length < BURST);
            not_too_many_open: assert (accepted <= OUTSTANDING);
            always_ready: assert (bready);
            if (take) room_for_every_word: assert (words_ready);
            if (burst_waits) room_for_every_burst: assert (closed_ready);
            if (!busy)
                all_answered: assert (!held && !open && waiting == 0 && accepted == 0 && !awvalid);

            invariant_total: assert (total == waiting + bursts && waiting <= CLOSED);
            invariant_bursts: assert (bursts == accepted + awvalid && bursts <= OUTSTANDING);
            invariant_finished: assert (bursts == finished + sending);
            invariant_words: assert (free_words + stored == DEPTH && free_words <= DEPTH
                && (!word_room || free_words != 0));
            invariant_waiting: assert (free_bursts + waiting == CLOSED && free_bursts <= CLOSED
                && (!burst_room || free_bursts != 0));
            if (sending) invariant_left: assert ({1'b0, beats_sent} + left == whole);
            if (sending) invariant_wlast: assert (wlast == (left == 0));
            if (held) invariant_last: assert (beat_last == (beat_flush || (&beat[STEP-1:0])));
            if (open) begin
                invariant_single: assert (single == (length == 0));
                invariant_open: assert ({1'b0, start[STEP-1:0]} + length < BURST);
                // What is held, where it follows, follows the open burst.
                if (!closing)
                    invariant_follows: assert ((held && !follows) || beat == newest + held);
                if (!closing) invariant_not_ended: assert (!marked && !(&newest[STEP-1:0]));
            end
            if (closing) invariant_closing: assert (open);
            a_burst_is_answered: cover (finished == 1 && done_valid);
        end
    end
