// SPDX-License-Identifier: Apache-2.0
// Write engine: single beats in, each with its address. Beats whose addresses follow each other
// are joined into one burst, up to the next multiple of BURST beats, so with 64 beats of 64 bytes
// none crosses 4 KiB. A burst is announced only when all its data is here, so the bus never waits
// for it. Responses come back in order, each with the tag of its burst's last beat.
module axi_write #(
    parameter int DATA = 512,
    parameter int ADDRESS = 64,
    parameter int BURST = 64,        // beats, a power of two
    parameter int OUTSTANDING = 16,  // bursts, a power of two
    parameter int DEPTH = 128,       // beats, a power of two, at least BURST
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
    input  logic               close,      // the open burst ends as it is
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
    localparam int TOTAL = $clog2(OUTSTANDING + CLOSED) + 1;
    localparam int BURST_BITS = BEAT + STEP + 1 + TAG;

    // The open burst.
    logic open, closing, marked;
    logic [BEAT-1:0] start, follows;
    logic [STEP-1:0] length;  // beats less one
    logic [TAG-1:0] tag;
    logic joins, take, push, last, at_once, data_ready, closed_ready;

    assign joins = open && (in_beat == follows);
    assign in_ready = !closing && data_ready && (!open || joins || closed_ready);
    assign take = in_valid && in_ready;
    // A beat that ends its burst closes it at once, unless another burst is closed in this cycle.
    assign last = in_flush || (&in_beat[STEP-1:0]);
    assign at_once = take && last && (!open || joins) && closed_ready;
    assign push = closed_ready
        && (closing || at_once || (open && in_valid && data_ready && !joins));

    always_ff @(posedge clk) begin
        if (rst) begin
            open <= 1'b0;
            closing <= 1'b0;
        end else if (closing) begin
            if (closed_ready) begin
                open <= 1'b0;
                closing <= 1'b0;
            end
        end else begin
            if (take) open <= !at_once;
            if (take ? (last && !at_once) : (open && close)) closing <= 1'b1;
        end
    end

    always_ff @(posedge clk) begin
        if (take) begin
            if (!joins) start <= in_beat;
            follows <= in_beat + 1'b1;
            length <= joins ? length + 1'b1 : {STEP{1'b0}};
            marked <= in_flush;
            tag <= in_tag;
        end
    end

    // Closed bursts, and their data.
    logic burst_valid, burst_ready, burst_marked, word_valid, word_ready;
    logic [BEAT-1:0] burst_start;
    logic [STEP-1:0] burst_length;
    logic [TAG-1:0] burst_tag;
    logic unused_ready, unused_valid;
    queue #(.WIDTH(BURST_BITS), .DEPTH(CLOSED)) closed (
        .clk(clk), .rst(rst),
        .in_valid(push), .in_ready(closed_ready),
        .in_data(at_once
            ? {joins ? start : in_beat, joins ? length + 1'b1 : {STEP{1'b0}}, in_flush, in_tag}
            : {start, length, marked, tag}),
        .out_valid(burst_valid), .out_ready(burst_ready),
        .out_data({burst_start, burst_length, burst_marked, burst_tag}));
    fifo #(.WIDTH(DATA), .DEPTH(DEPTH)) words (
        .clk(clk), .rst(rst),
        .in_valid(take), .in_ready(data_ready), .in_data(in_data),
        .out_valid(word_valid), .out_ready(word_ready), .out_data(wdata));

    // Bursts on the bus.
    logic sending;
    logic [STEP-1:0] left;  // beats less one
    logic [COUNT:0] bursts;
    logic [TOTAL-1:0] total;

    assign burst_ready = (!awvalid || awready) && (!sending || (wvalid && wready && wlast))
        && (bursts != OUTSTANDING[COUNT:0]);
    assign wvalid = sending && word_valid;
    assign wlast = left == 0;
    assign word_ready = sending && wready;
    assign bready = 1'b1;
    assign done_valid = bvalid && bready;
    assign done_error = bresp != 2'b00;
    assign busy = open || (total != 0);

    always_ff @(posedge clk) begin
        if (rst) begin
            awvalid <= 1'b0;
            sending <= 1'b0;
            bursts <= '0;
            total <= '0;
        end else begin
            if (burst_valid && burst_ready) begin
                awvalid <= 1'b1;
                sending <= 1'b1;
            end else begin
                if (awready) awvalid <= 1'b0;
                if (wvalid && wready && wlast) sending <= 1'b0;
            end
            bursts <= bursts + {{COUNT{1'b0}}, burst_valid && burst_ready}
                - {{COUNT{1'b0}}, done_valid};
            total <= total + {{(TOTAL - 1){1'b0}}, push} - {{(TOTAL - 1){1'b0}}, done_valid};
        end
    end

    always_ff @(posedge clk) begin
        if (burst_valid && burst_ready) begin
            awaddr <= {burst_start, {SHIFT{1'b0}}};
            awlen <= {{(8 - STEP){1'b0}}, burst_length};
            left <= burst_length;
        end else if (wvalid && wready) begin
            left <= left - 1'b1;
        end
    end

    queue #(.WIDTH(1 + TAG), .DEPTH(OUTSTANDING)) tags (
        .clk(clk), .rst(rst),
        .in_valid(burst_valid && burst_ready), .in_ready(unused_ready),
        .in_data({burst_marked, burst_tag}),
        .out_valid(unused_valid), .out_ready(done_valid), .out_data({done_marked, done_tag}));
endmodule
