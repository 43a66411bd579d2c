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

    // The core's beats pass in the last two.
    localparam logic [2:0] RECORD = 0, QUIET = 1, LAST_STATUS = 2, END = 3, RUN = 4, GRACE = 5;
    logic [2:0] state;
    logic [31:0] index;
    logic [16:0] tokens, count, count_next;  // of the segment; of its status; with this unit
    logic [16:0] units;       // of the open block
    logic last_unit;          // ends it
    logic [7:0] still;
    logic [1:0] error;
    logic ends;               // the launch ends with the next status beat

    // The write engine and its tags.
    logic busy, in_valid, in_ready, in_flush, close;
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

    // Status beats that are due. No beat is taken while the status of its block might not fit.
    logic due, due_ready, unused_ready;
    logic [31:0] due_index;
    logic [COUNT-1:0] due_count;
    queue #(.WIDTH(32 + COUNT), .DEPTH(BLOCKS)) statuses (
        .clk(clk), .rst(rst),
        .in_valid(done_valid && done_marked && !done_status && !done_error && !failed
            && !status_failed),
        .in_ready(unused_ready), .in_data({done_index, done_count}),
        .out_valid(due), .out_ready(due_ready), .out_data({due_index, due_count}));

    // The next one, with its place. It goes before the core's beats.
    logic say;
    logic [57:0] say_place;
    logic [COUNT-1:0] say_count;
    logic [1:0] say_error;
    assign due_ready = (!say || in_ready || status_failed) && state != LAST_STATUS;
    always_ff @(posedge clk) begin
        if (rst || status_failed) say <= 1'b0;
        else if (!say || in_ready) say <= due || state == LAST_STATUS;
        if (!say || in_ready) begin
            say_place <= status + ((state == LAST_STATUS) ? index : due_index);
            say_count <= (state == LAST_STATUS) ? count : due_count;
            say_error <= (state == LAST_STATUS) ? error : 2'd0;
        end
    end

    // The core's beats, with their places. A unit ends with a beat; so may a block.
    logic beat_valid, beat_ready, beat_last, unit_ends, block_ends, crowded, passes, takes;
    logic [57:0] beat_place;
    logic [511:0] beat_data;
    generate
        if (KIND == 2) begin : g_shadow
            // Offsets are added to the segment's place, and compared with the group's last, in a
            // cycle of their own.
            logic held;
            logic [57:0] base;
            logic [31:0] group_last;
            assign beat_valid = held;
            assign out_ready = state[2] && (!held || (beat_ready && !beat_last));
            always_ff @(posedge clk) begin
                if (rst) held <= 1'b0;
                else if (out_valid && out_ready) held <= 1'b1;
                else if (beat_ready) held <= 1'b0;
                if (out_valid && out_ready) begin
                    beat_place <= base + out_beat;
                    beat_data <= out_data;
                    beat_last <= out_last;
                    unit_ends <= out_last || out_beat == group_last;
                    if (out_beat == group_last) group_last <= group_last + GROUP_BEATS;
                end
                if (state == RECORD) begin
                    base <= record_beat;
                    group_last <= KV - 1;
                end
            end
        end else begin : g_scores
            // Units lie one behind the other, the further beats of one a stride apart.
            logic [57:0] unit_place;
            logic [31:0] stride;
            assign beat_valid = out_valid;
            assign out_ready = beat_ready;
            assign beat_data = out_data;
            assign beat_last = out_last;
            assign unit_ends = (QUERIES > 1) ? out_row_ends : (!kv_head || out_head == KV - 1);
            always_ff @(posedge clk) begin
                if (state == RECORD) begin
                    unit_place <= record_beat;
                    beat_place <= record_beat;
                    stride <= record_stride;
                end else if (out_valid && out_ready) begin
                    if (unit_ends) unit_place <= unit_place + 1'b1;
                    beat_place <= unit_ends ? unit_place + 1'b1 : beat_place + stride;
                end
            end
        end
    endgenerate
    assign block_ends = beat_last || (unit_ends && last_unit);
    assign passes = state[2] && !failed && !status_failed && !crowded;
    assign beat_ready = passes && !say && in_ready;
    assign takes = beat_valid && beat_ready;
    assign in_valid = say || (passes && beat_valid);
    assign close = (state == QUIET);
    always_comb begin
        in_beat = say ? say_place : beat_place;
        in_data = beat_data;
        in_flush = say || block_ends;
        in_tag = {say, index, count_next};
        if (say) begin
            in_data = '0;
            in_data[63:0] = SPEC_HASH;
            in_data[95:64] = launch_id;
            in_data[96+:COUNT] = say_count;
            in_data[129:128] = say_error;
        end
    end

    // Blocks whose status is not on its way. One may have ended since they were counted.
    logic [$clog2(BLOCKS):0] blocks;
    always_ff @(posedge clk) begin
        if (rst) begin
            blocks <= '0;
            crowded <= 1'b0;
        end else begin
            if ((takes && block_ends) != (due && due_ready))
                blocks <= (due && due_ready) ? blocks - 1'b1 : blocks + 1'b1;
            crowded <= blocks >= BLOCKS - 1;
        end
    end

    assign record_ready = state == RECORD && !failed && !status_failed;
    // Nothing is written, answered or said any more.
    logic quiet;
    assign quiet = !busy && !say && !due;
    assign finished = (state == END && !busy && !say)
        || (state == QUIET && quiet && ends && !failed && !status_failed && error == 0);
    // What is compared is compared a cycle earlier: when nothing is under way it stays.
    logic was_quiet, counted, fault;
    always_ff @(posedge clk) begin
        was_quiet <= quiet && !rst;
        counted <= complete_index == (failed ? failed_index : index);
        fault <= (load_fault && load_fault_index == index)
            || (key_fault && key_fault_index == index);
    end

    always_ff @(posedge clk) begin
        if (rst) begin
            state <= RECORD;
            index <= 32'd0;
            ends <= 1'b0;
        end else begin
            case (state)
                RECORD: begin
                    units <= 17'd0;
                    last_unit <= UNITS == 1;
                    error <= record_error;
                    tokens <= record_tokens;
                    count_next <= (record_tokens < UNIT) ? record_tokens : UNIT[16:0];
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
                    still <= (out_valid || beat_valid || state == RUN) ? 8'd0 : still + 8'd1;
                    if (state == RUN && fault) state <= GRACE;
                    if (takes && unit_ends) begin
                        count_next <= (count_next + UNIT >= tokens) ? tokens
                            : count_next + UNIT[16:0];
                        units <= block_ends ? 17'd0 : units + 17'd1;
                        last_unit <= block_ends ? UNITS == 1 : units == UNITS - 2;
                    end
                    if (takes && beat_last) begin
                        state <= RECORD;
                        index <= index + 32'd1;
                    end
                    if (state == GRACE && still == 8'd255 && !out_valid && !beat_valid) begin
                        error <= BUS;
                        ends <= 1'b1;
                        state <= QUIET;
                    end
                    if (failed || status_failed) state <= QUIET;
                end
                // All that was written is answered, all that was due is said.
                QUIET: begin
                    if (status_failed) begin
                        if (!busy && !say) state <= END;
                    end else if (was_quiet) begin
                        state <= (ends && !failed && error == 0) ? END : LAST_STATUS;
                        count <= counted ? complete_count : 17'd0;
                        if (failed) begin
                            index <= failed_index;
                            error <= BUS;
                            ends <= 1'b1;
                        end
                    end
                end
                // A segment without tokens: the launch goes on.
                LAST_STATUS: begin
                    state <= ends ? END : RECORD;
                    if (!ends) index <= index + 32'd1;
                end
                default: ;
            endcase
        end
    end
endmodule
