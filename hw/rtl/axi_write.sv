// SPDX-License-Identifier: Apache-2.0
// Write engine: single beats in, each with its address. Beats whose addresses follow each other
// are joined into one burst, up to the next multiple of BURST beats, so with 64 beats of 64 bytes
// none crosses 4 KiB. A burst is announced only when all its data is here, so the bus never waits
// for it. Responses come back in order, each with the tag of its burst's last beat.
//
// A beat's address is held in a register before it meets the open burst: whether the beat follows
// the one before is known by then, and whether there is room was known a cycle earlier.
module axi_write #(
    parameter int DATA = 512,
    parameter int ADDRESS = 64,
    parameter int BURST = 64,        // beats, a power of two
    parameter int OUTSTANDING = 16,  // bursts, a power of two
    parameter int DEPTH = 128,       // beats, a power of two, more than BURST + 1
    parameter int CLOSED = 32,       // bursts that wait, a power of two
    parameter int TAG = 1,
    parameter int SHIFT = $clog2(DATA / 8),
    parameter int BEAT = ADDRESS - SHIFT
) (
    input  logic               clk,
    input  logic               rst,        // while bursts are open, only together with the bus
    output logic               busy,       // a beat was taken whose response has not come
    input  logic               in_valid,
    output logic               in_ready,
    input  logic [BEAT-1:0]    in_beat,    // address in beats
    input  logic [DATA-1:0]    in_data,
    input  logic               in_flush,   // the burst ends with this beat and is marked
    input  logic [TAG-1:0]     in_tag,
    input  logic               close,      // the open burst ends as it is; held until it has
    output logic               awvalid,
    input  logic               awready,
    output logic [ADDRESS-1:0] awaddr,
    output logic [7:0]         awlen,
    output logic               wvalid,
    input  logic               wready,
    output logic [DATA-1:0]    wdata,
    output logic               wlast,
    input  logic               bvalid,
    output logic               bready,
    input  logic [1:0]         bresp,
    output logic               done_valid,  // one cycle per burst
    output logic               done_marked,
    output logic               done_error,
    output logic [TAG-1:0]     done_tag
);
    localparam int STEP = $clog2(BURST);
    localparam int COUNT = $clog2(OUTSTANDING);
    localparam int ROOM = $clog2(DEPTH);
    localparam int WAIT = $clog2(CLOSED);
    localparam int TOTAL = $clog2(OUTSTANDING + CLOSED) + 1;
    localparam int BURST_BITS = BEAT + STEP + 1 + TAG;

    // The beat that was taken last. It is held until there is room for the burst it may close.
    logic held, follows, beat_flush, beat_last, take, moves;
    logic word_room, burst_room;
    logic [BEAT-1:0] beat;
    logic [TAG-1:0] beat_tag;

    assign in_ready = word_room && (!held || burst_room);
    assign take = in_valid && in_ready;
    assign moves = held && burst_room;

    always_ff @(posedge clk) begin
        if (rst) held <= 1'b0;
        else if (take) held <= 1'b1;
        else if (burst_room) held <= 1'b0;
    end
    always_ff @(posedge clk) begin
        if (take) begin
            beat <= in_beat;
            beat_tag <= in_tag;
            beat_flush <= in_flush;
            beat_last <= in_flush || (&in_beat[STEP-1:0]);
            // Only within a multiple of BURST: behind its last beat no burst is open.
            follows <= in_beat == {beat[BEAT-1:STEP], beat[STEP-1:0] + 1'b1};
        end
    end

    // The open burst.
    logic open, closing, marked, joins, at_once, push;
    logic [BEAT-1:0] start;
    logic [STEP-1:0] length;  // beats less one
    logic single;             // length is 0
    logic [TAG-1:0] tag;

    assign joins = open && !closing && follows;
    // A beat that ends its burst closes it at once, unless another burst is closed in this cycle.
    assign at_once = held && beat_last && (!open || joins);
    assign push = burst_room && (at_once || (open && (closing || (held ? !follows : close))));

    always_ff @(posedge clk) begin
        if (rst) begin
            open <= 1'b0;
            closing <= 1'b0;
        end else if (moves) begin
            open <= !at_once;
            closing <= beat_last && !at_once;
        end else if (push) begin
            open <= 1'b0;
            closing <= 1'b0;
        end
    end

    always_ff @(posedge clk) begin
        if (moves) begin
            if (!joins) start <= beat;
            length <= joins ? length + 1'b1 : {STEP{1'b0}};
            single <= !joins;
            marked <= beat_flush;
            tag <= beat_tag;
        end
    end

    // Closed bursts, and their data. The first one does not wait in the queue.
    logic [BEAT-1:0] pushed_start, burst_start;
    logic [STEP-1:0] pushed_length, burst_length;
    logic pushed_marked, burst_marked, pushed_single, burst_single;
    logic [TAG-1:0] pushed_tag, burst_tag;
    logic [BURST_BITS-1:0] front;
    logic queued, direct, sends, burst_ready, word_valid, word_ready;
    logic words_ready, closed_ready, unused_ready, unused_valid;

    assign pushed_start = (at_once && !joins) ? beat : start;
    assign pushed_length = !at_once ? length : joins ? length + 1'b1 : {STEP{1'b0}};
    assign pushed_single = at_once ? !joins : single;
    assign pushed_marked = at_once ? beat_flush : marked;
    assign pushed_tag = at_once ? beat_tag : tag;
    assign direct = push && !queued && burst_ready;
    assign sends = (queued || push) && burst_ready;
    assign {burst_start, burst_length, burst_marked, burst_tag} = queued ? front
        : {pushed_start, pushed_length, pushed_marked, pushed_tag};
    assign burst_single = queued ? front[1+TAG+:STEP] == 0 : pushed_single;

    queue #(.WIDTH(BURST_BITS), .DEPTH(CLOSED)) closed (
        .clk(clk), .rst(rst),
        .in_valid(push && !direct), .in_ready(closed_ready),
        .in_data({pushed_start, pushed_length, pushed_marked, pushed_tag}),
        .out_valid(queued), .out_ready(burst_ready), .out_data(front));
    fifo #(.WIDTH(DATA), .DEPTH(DEPTH)) words (
        .clk(clk), .rst(rst),
        .in_valid(take), .in_ready(words_ready), .in_data(in_data),
        .out_valid(word_valid), .out_ready(word_ready), .out_data(wdata));

    // Room for a word and for a burst, told a cycle late: one may have gone meanwhile.
    logic [ROOM:0] free_words;
    logic [WAIT:0] free_bursts;
    logic word_leaves, burst_waits, burst_leaves;
    assign word_leaves = word_valid && word_ready;
    assign burst_waits = push && !direct;
    assign burst_leaves = queued && burst_ready;
    always_ff @(posedge clk) begin
        if (rst) begin
            free_words <= DEPTH[ROOM:0];
            free_bursts <= CLOSED[WAIT:0];
            word_room <= 1'b0;
            burst_room <= 1'b0;
        end else begin
            if (take != word_leaves)
                free_words <= word_leaves ? free_words + 1'b1 : free_words - 1'b1;
            if (burst_waits != burst_leaves)
                free_bursts <= burst_leaves ? free_bursts + 1'b1 : free_bursts - 1'b1;
            word_room <= free_words > 1;
            burst_room <= free_bursts > 1;
        end
    end

    // Bursts on the bus.
    logic sending;
    logic [STEP-1:0] left;  // beats less one; the last one is told by a register
    logic [COUNT:0] bursts;
    logic [TOTAL-1:0] total;

    assign burst_ready = (!awvalid || awready) && (!sending || (wvalid && wready && wlast))
        && (bursts != OUTSTANDING[COUNT:0]);
    assign wvalid = sending && word_valid;
    assign word_ready = sending && wready;
    assign bready = 1'b1;
    assign done_valid = bvalid && bready;
    assign done_error = bresp != 2'b00;
    assign busy = held || open || (total != 0);

    always_ff @(posedge clk) begin
        if (rst) begin
            awvalid <= 1'b0;
            sending <= 1'b0;
            bursts <= '0;
            total <= '0;
        end else begin
            if (sends) begin
                awvalid <= 1'b1;
                sending <= 1'b1;
            end else begin
                if (awready) awvalid <= 1'b0;
                if (wvalid && wready && wlast) sending <= 1'b0;
            end
            if (sends != done_valid) bursts <= done_valid ? bursts - 1'b1 : bursts + 1'b1;
            total <= total + {{(TOTAL - 1){1'b0}}, push} - {{(TOTAL - 1){1'b0}}, done_valid};
        end
    end

    always_ff @(posedge clk) begin
        if (sends) begin
            awaddr <= {burst_start, {SHIFT{1'b0}}};
            awlen <= {{(8 - STEP){1'b0}}, burst_length};
            left <= burst_length;
            wlast <= burst_single;
        end else if (wvalid && wready) begin
            left <= left - 1'b1;
            wlast <= left == 1;
        end
    end

    queue #(.WIDTH(1 + TAG), .DEPTH(OUTSTANDING)) tags (
        .clk(clk), .rst(rst),
        .in_valid(sends), .in_ready(unused_ready),
        .in_data({burst_marked, burst_tag}),
        .out_valid(unused_valid), .out_ready(done_valid), .out_data({done_marked, done_tag}));
endmodule
