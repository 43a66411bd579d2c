// SPDX-License-Identifier: Apache-2.0
// Goes before the `endmodule` of axi_read.sv, where it sees the registers. Addresses, counts and
// room for data, at the sizes of the kernels and for ever. The memory answers when it likes, in
// any number of beats per burst, but never more beats than were asked for in all. What the queue
// and the FIFO inside promise is proved about them alone (fifo_inside.sv) and assumed here.
    logic running = 1'b0;
    always @(posedge clk) running <= 1'b1;
    always @(*) assume (rst == !running);

    logic [ROOM+1:0] stored, due;  // beats in the FIFO; beats asked for that have not come
    logic [COUNT:0] open;        // bursts whose address was taken
    logic waited, stopped;
    logic [ADDRESS-1:0] address;
    logic [7:0] burst;
    always @(*) begin
        if (command_valid) assume (command_beats != 0 && command_rows != 0);
        if (rvalid) assume (open != 0 && due != 0);
        // Of the queue: what comes out was put in.
        if (queued) assume (front[COMMAND-BEAT-1-:32] != 0 && front[48:32] != 0);
        // Of the FIFO: it takes while there is room, and gives only what it holds.
        if (stored < DEPTH) assume (room);
        if (out_valid) assume (stored != 0);
    end
    always @(posedge clk) begin
        if (rst) begin
            {stored, due, open, waited, stopped} <= '0;
        end else begin
            stored <= stored + (rvalid && !stop && room) - pop;
            due <= due + (issue ? length : 0) - rvalid;
            open <= open + (arvalid && arready) - closes;
            waited <= arvalid && !arready;
            stopped <= stop;
            address <= araddr;
            burst <= arlen;
        end
        if (running) begin
            if (stopped) assume (stop);
            if (waited) ar_stays: assert (arvalid && araddr == address && arlen == burst);
            if (arvalid) begin
                no_page_crossed: assert (araddr[ADDRESS-1:SHIFT+STEP]
                    == (araddr + (arlen << SHIFT)) >> (SHIFT + STEP));
                no_long_burst: assert (arlen < BURST);
            end
            not_too_many_open: assert (open <= OUTSTANDING);
            always_ready: assert (rready);
            if (idle) idle_is_idle: assert (open == 0 && !arvalid);
            if (stopped && !waited) no_burst_after_stop: assert (!arvalid);
            if (rvalid && !stop) room_for_every_beat: assert (stored < DEPTH);

            invariant_bursts: assert (bursts == open + arvalid && bursts <= OUTSTANDING);
            if (active) invariant_left: assert (beats != 0 && rows != 0);
            if (active && !fresh) begin
                invariant_length: assert (length != 0 && length + beat[STEP-1:0] <= BURST);
                if (!row_ends)
                    invariant_rest: assert (rest != 0 && length + beat[STEP-1:0] == BURST);
            end
            invariant_room: assert (stored <= DEPTH && due <= DEPTH
                && stored + due + free <= DEPTH && free <= DEPTH);
            two_bursts: cover (open == 2 && stored == 1);
        end
    end
