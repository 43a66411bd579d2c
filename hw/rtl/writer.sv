// SPDX-License-Identifier: Apache-2.0
// The write port: the core's beats to their places, and status beats. The front walks the records
// of the segments in order and hands beats to the write engine; a marked burst ends a block. When
// its response comes, and with it all earlier ones, the block is complete and its status is due.
// Scoring goes on meanwhile.
module writer #(
    parameter int KIND = 0,            // 0 or 1 scores, 2 a shadow
    parameter int KV = 3,
    parameter int QUERIES = 1,         // of a segment at most
    parameter int BLOCK_TOKENS = 1024,
    parameter int GROUP_BEATS = 99,    // of the shadow
    parameter logic [63:0] SPEC_HASH = 64'd0  // first byte lowest
) (
    input  logic         clk,
    input  logic         rst,
    input  logic [31:0]  launch_id,
    input  logic         kv_head,      // scope
    input  logic [57:0]  status,       // base address in beats
    output logic         finished,
    // Records.
    input  logic         record_valid,
    output logic         record_ready,
    input  logic         record_end,
    input  logic [1:0]   record_error,
    input  logic [16:0]  record_tokens,
    input  logic [57:0]  record_beat,
    input  logic [31:0]  record_stride,
    // Bus errors on the way in.
    input  logic         load_fault,
    input  logic [31:0]  load_fault_index,
    input  logic         key_fault,
    input  logic [31:0]  key_fault_index,
    // Core.
    input  logic         out_valid,
    output logic         out_ready,
    input  logic [511:0] out_data,
    input  logic [5:0]   out_head,     // scores
    input  logic         out_row_ends, // scores of several queries: the last of 16 tokens
    input  logic [31:0]  out_beat,     // shadow
    input  logic         out_last,
    // Bus.
    output logic         awvalid,
    input  logic         awready,
    output logic [63:0]  awaddr,
    output logic [7:0]   awlen,
    output logic         wvalid,
    input  logic         wready,
    output logic [511:0] wdata,
    output logic         wlast,
    input  logic         bvalid,
    output logic         bready,
    input  logic [1:0]   bresp
);
    localparam int COUNT = 17;
    localparam int TAG = 1 + 32 + COUNT;  // is a status beat; segment; tokens complete with it
    localparam int BLOCKS = 16;
    // Scores come a beat per 16 tokens at most, and the last burst of a launch is not sent before
    // it is complete: short ones end a launch earlier and cost the bus nothing.
    localparam int BURST = (KIND == 2) ? 64 : 4;
    // Tokens that complete together: 16 of a score beat, 64 of a group of the shadow.
    localparam int UNIT = (KIND == 2) ? 64 : 16;
    localparam int UNITS = (BLOCK_TOKENS % UNIT == 0) ? BLOCK_TOKENS / UNIT : 65536;
    localparam logic [1:0] BUS = 2;

    localparam logic [2:0] RECORD = 0, RUN = 1, GRACE = 2, QUIET = 3, LAST_STATUS = 4, END = 5;
    logic [2:0] state;
    logic [31:0] index;
    logic [16:0] tokens, count;
    logic [57:0] base, row, place;
    logic [31:0] stride;
    logic [16:0] units;       // of the open block
    logic [7:0] still;
    logic [1:0] error;
    logic ends;               // the launch ends with the next status beat

    // The write engine and its tags.
    logic busy, in_valid, in_ready, in_flush, close, take_status, take_beat;
    logic [57:0] in_beat;
    logic [511:0] in_data;
    logic [TAG-1:0] in_tag, done_tag;
    logic done_valid, done_marked, done_error, done_status;
    logic [31:0] done_index;
    logic [COUNT-1:0] done_count;
    axi_write #(.TAG(TAG), .BURST(BURST)) write (
        .clk(clk), .rst(rst), .busy(busy),
        .in_valid(in_valid), .in_ready(in_ready), .in_beat(in_beat), .in_data(in_data),
        .in_flush(in_flush), .in_tag(in_tag), .close(close),
        .awvalid(awvalid), .awready(awready), .awaddr(awaddr), .awlen(awlen),
        .wvalid(wvalid), .wready(wready), .wdata(wdata), .wlast(wlast),
        .bvalid(bvalid), .bready(bready), .bresp(bresp),
        .done_valid(done_valid), .done_marked(done_marked), .done_error(done_error),
        .done_tag(done_tag));
    assign {done_status, done_index, done_count} = done_tag;

    // Responses: what is complete, and the first that failed.
    logic [31:0] complete_index, failed_index;
    logic [COUNT-1:0] complete_count;
    logic failed, status_failed;
    always_ff @(posedge clk) begin
        if (rst) begin
            failed <= 1'b0;
            status_failed <= 1'b0;
            complete_index <= 32'd0;
            complete_count <= '0;
        end else if (done_valid && !failed && !status_failed) begin
            if (done_error) begin
                failed <= !done_status;
                status_failed <= done_status;
                failed_index <= done_index;
            end else if (done_marked && !done_status) begin
                complete_index <= done_index;
                complete_count <= done_count;
            end
        end
    end

    // Status beats that are due. The front starts no block whose status would not fit.
    logic due, due_ready, unused_ready;
    logic [31:0] due_index;
    logic [COUNT-1:0] due_count;
    logic [$clog2(BLOCKS):0] blocks;
    queue #(.WIDTH(32 + COUNT), .DEPTH(BLOCKS)) statuses (
        .clk(clk), .rst(rst),
        .in_valid(done_valid && done_marked && !done_status && !done_error && !failed
            && !status_failed),
        .in_ready(unused_ready), .in_data({done_index, done_count}),
        .out_valid(due), .out_ready(due_ready), .out_data({due_index, due_count}));

    // The core's beats.
    logic unit_ends, block_ends, fault, gate;
    logic [16:0] count_next;
    logic [57:0] score_place;
    assign unit_ends = (KIND == 2) ? (out_last || place == base + out_beat[31:0])
        : (QUERIES > 1) ? out_row_ends : (!kv_head || out_head == KV - 1);
    assign count_next = (count + UNIT >= tokens) ? tokens : count + UNIT[16:0];
    assign block_ends = out_last || (unit_ends && units == UNITS - 1);
    assign score_place = ((kv_head || QUERIES > 1) && out_head != 0) ? place : row;
    assign fault = (load_fault && load_fault_index == index)
        || (key_fault && key_fault_index == index);
    assign gate = !(block_ends && blocks == BLOCKS);

    assign take_status = (state == LAST_STATUS) || (due && !status_failed);
    assign take_beat = ((state == RUN) || (state == GRACE)) && !failed && !status_failed && gate;
    assign due_ready = (due && status_failed) || (due && in_ready && state != LAST_STATUS);
    assign out_ready = take_beat && !take_status && in_ready;
    assign in_valid = take_status || (take_beat && out_valid);
    assign close = (state == QUIET);
    always_comb begin
        in_beat = (KIND == 2) ? base + out_beat : score_place;
        in_data = out_data;
        in_flush = block_ends;
        in_tag = {1'b0, index, unit_ends ? count_next : count};
        if (take_status) begin
            in_flush = 1'b1;
            in_beat = status + ((state == LAST_STATUS) ? index : due_index);
            in_tag = {1'b1, 32'd0, {COUNT{1'b0}}};
            in_data = '0;
            in_data[63:0] = SPEC_HASH;
            in_data[95:64] = launch_id;
            in_data[96+:COUNT] = (state == LAST_STATUS) ? count : due_count;
            in_data[129:128] = (state == LAST_STATUS) ? error : 2'd0;
        end
    end

    assign record_ready = state == RECORD && !failed && !status_failed;
    // Nothing is written, answered or said any more.
    logic quiet;
    assign quiet = !busy && !due;
    assign finished = (state == END && !busy)
        || (state == QUIET && quiet && ends && !failed && !status_failed && error == 0);

    always_ff @(posedge clk) begin
        if (rst) begin
            state <= RECORD;
            index <= 32'd0;
            blocks <= '0;
            ends <= 1'b0;
        end else begin
            blocks <= blocks + (out_valid && out_ready && block_ends) - (due && due_ready);
            case (state)
                RECORD: begin
                    count <= 17'd0;
                    units <= 17'd0;
                    error <= record_error;
                    tokens <= record_tokens;
                    base <= record_beat;
                    row <= record_beat;
                    place <= record_beat + ((KIND == 2) ? KV - 1 : 0);
                    stride <= record_stride;
                    if (failed || status_failed) state <= QUIET;
                    else if (record_valid) begin
                        ends <= record_end || record_error != 0;
                        if (record_end || record_error != 0 || record_tokens == 0) state <= QUIET;
                        else state <= RUN;
                        if (record_end) error <= 2'd0;
                    end
                end
                RUN, GRACE: begin
                    // After a bus error on the way in, what the core still holds comes out first:
                    // its last beats are as far apart as its slowest process.
                    still <= (out_valid || state == RUN) ? 8'd0 : still + 8'd1;
                    if (state == RUN && fault) state <= GRACE;
                    if (out_valid && out_ready) begin
                        if (KIND == 2) begin
                            if (unit_ends) place <= place + GROUP_BEATS;
                        end else if (unit_ends) begin
                            row <= row + 1'b1;
                        end else begin
                            place <= score_place + stride;
                        end
                        if (unit_ends) count <= count_next;
                        if (unit_ends) units <= block_ends ? 17'd0 : units + 17'd1;
                        if (out_last) begin
                            state <= RECORD;
                            index <= index + 32'd1;
                        end
                    end
                    if (state == GRACE && still == 8'd255 && !out_valid) begin
                        error <= BUS;
                        ends <= 1'b1;
                        state <= QUIET;
                    end
                    if (failed || status_failed) state <= QUIET;
                end
                // All that was written is answered, all that was due is said.
                QUIET: begin
                    if (status_failed) begin
                        if (!busy) state <= END;
                    end else if (quiet) begin
                        state <= (ends && !failed && error == 0) ? END : LAST_STATUS;
                        count <= (complete_index == (failed ? failed_index : index))
                            ? complete_count : 17'd0;
                        if (failed) begin
                            index <= failed_index;
                            error <= BUS;
                            ends <= 1'b1;
                        end
                    end
                end
                LAST_STATUS: if (in_ready) begin
                    // A segment without tokens: the launch goes on.
                    state <= ends ? END : RECORD;
                    if (!ends) index <= index + 32'd1;
                end
                default: ;
            endcase
        end
    end
endmodule
