// SPDX-License-Identifier: Apache-2.0
// Read engine: a command names rows of consecutive beats and the stride between them; the beats
// come out in order. A burst ends at every multiple of BURST beats, so with 64 beats of 64 bytes
// none crosses 4 KiB. Only beats that fit into the FIFO are asked for: RREADY never falls, and an
// interconnect that others share is never blocked.
module axi_read #(
    parameter int DATA = 512,
    parameter int ADDRESS = 64,
    parameter int BURST = 64,         // beats, a power of two
    parameter int OUTSTANDING = 16,   // bursts
    parameter int DEPTH = 512,        // beats, a power of two, at least BURST
    parameter int COMMANDS = 4,       // a power of two
    parameter int SHIFT = $clog2(DATA / 8),
    parameter int BEAT = ADDRESS - SHIFT
) (
    input  logic               clk,
    input  logic               rst,        // while bursts are open, only together with the bus
    // A launch that ends early: no new burst, what still comes is dropped. Held until `idle`.
    input  logic               stop,
    output logic               idle,
    input  logic               command_valid,
    output logic               command_ready,
    input  logic [BEAT-1:0]    command_beat,    // address in beats
    input  logic [31:0]        command_beats,   // of one row, not 0
    input  logic [16:0]        command_rows,    // not 0
    input  logic [31:0]        command_stride,  // in beats
    output logic               arvalid,
    input  logic               arready,
    output logic [ADDRESS-1:0] araddr,
    output logic [7:0]         arlen,
    input  logic               rvalid,
    output logic               rready,
    input  logic [DATA-1:0]    rdata,
    input  logic               rlast,
    input  logic [1:0]         rresp,
    output logic               out_valid,
    input  logic               out_ready,
    output logic [DATA-1:0]    out_data,
    output logic               out_error
);
    localparam int STEP = $clog2(BURST);
    localparam int ROOM = $clog2(DEPTH);
    localparam int COUNT = $clog2(OUTSTANDING);
    localparam int COMMAND = BEAT + 32 + 17 + 32;

    // Commands; the first one does not wait in the queue.
    logic next_valid, next_ready, queued, at_once;
    logic [BEAT-1:0] next_beat;
    logic [31:0] next_beats, next_stride;
    logic [16:0] next_rows;
    logic [COMMAND-1:0] front;
    queue #(.WIDTH(COMMAND), .DEPTH(COMMANDS)) commands (
        .clk(clk), .rst(rst),
        .in_valid(command_valid && !at_once), .in_ready(command_ready),
        .in_data({command_beat, command_beats, command_rows, command_stride}),
        .out_valid(queued), .out_ready(next_ready), .out_data(front));
    assign at_once = command_valid && !queued && next_ready;
    assign next_valid = queued || at_once;
    assign {next_beat, next_beats, next_rows, next_stride} = queued ? front
        : {command_beat, command_beats, command_rows, command_stride};

    // Bursts. How long one is, and whether its row ends with it, is worked out a cycle before it is
    // asked for: with a command that did not wait, with the burst before, or in a cycle of its own
    // (`fresh`) for the next row and for a command from the queue. The bus is busy then.
    logic active, fresh;
    logic [BEAT-1:0] beat, row;
    logic [31:0] whole, beats, stride;
    logic [31:0] rest;          // beats of the row behind the burst, where it does not end the row
    logic [16:0] rows;
    logic [STEP-1:0] offset;
    logic [STEP:0] to_boundary, length;
    logic [ROOM:0] free;        // places of the FIFO that no beat was asked for
    logic [COUNT:0] bursts;
    logic issue, in_one, row_ends, closes, pop;

    assign offset = active ? beat[STEP-1:0] : command_beat[STEP-1:0];
    assign whole = active ? beats : command_beats;
    assign to_boundary = BURST[STEP:0] - {1'b0, offset};
    assign in_one = whole <= {{(31 - STEP){1'b0}}, to_boundary};
    assign issue = active && !fresh && !stop && (!arvalid || arready)
        && (bursts != OUTSTANDING[COUNT:0])
        && ({{(ROOM - STEP){1'b0}}, length} <= free);
    assign next_ready = !active && !stop;
    assign closes = rvalid && rready && rlast;
    assign pop = out_valid && out_ready;
    assign idle = !arvalid && (bursts == 0);

    always_ff @(posedge clk) begin
        if (rst) begin
            active <= 1'b0;
            fresh <= 1'b0;
            arvalid <= 1'b0;
            free <= DEPTH[ROOM:0];
            bursts <= '0;
        end else begin
            if (arready) arvalid <= 1'b0;
            if (issue) arvalid <= 1'b1;
            if (!active) active <= next_valid && !stop;
            else if (issue && row_ends && rows == 17'd1) active <= 1'b0;
            fresh <= active ? (issue && row_ends) : queued;
            free <= free + {{ROOM{1'b0}}, pop}
                - (issue ? {{(ROOM - STEP){1'b0}}, length} : {(ROOM + 1){1'b0}});
            bursts <= bursts + {{COUNT{1'b0}}, issue} - {{COUNT{1'b0}}, closes};
        end
    end

    always_ff @(posedge clk) begin
        if (!active || fresh) begin
            length <= in_one ? whole[STEP:0] : to_boundary;
            row_ends <= in_one;
            rest <= whole - {{(31 - STEP){1'b0}}, to_boundary};
        end else if (issue) begin
            // Behind a burst that does not end its row the next one starts at a multiple of BURST.
            length <= (rest[31:STEP] == 0) ? rest[STEP:0] : BURST[STEP:0];
            row_ends <= (rest <= BURST);
            rest <= {rest[31:STEP] - 1'b1, rest[STEP-1:0]};
        end
        if (!active) begin
            beat <= next_beat;
            row <= next_beat;
            beats <= next_beats;
            rows <= next_rows;
            stride <= next_stride;
        end else if (issue) begin
            araddr <= {beat, {SHIFT{1'b0}}};
            arlen <= {{(8 - STEP - 1){1'b0}}, length} - 8'd1;
            if (row_ends) begin
                beat <= row + stride;
                row <= row + stride;
                rows <= rows - 17'd1;
            end else begin
                beat <= {beat[BEAT-1:STEP] + 1'b1, {STEP{1'b0}}};
            end
        end
    end

    // Data. The reservation keeps the FIFO from being full when a beat comes.
    logic room;
    assign rready = 1'b1;
    fifo #(.WIDTH(DATA + 1), .DEPTH(DEPTH)) data (
        .clk(clk), .rst(rst),
        .in_valid(rvalid && !stop), .in_ready(room),
        .in_data({rresp != 2'b00, rdata}),
        .out_valid(out_valid), .out_ready(out_ready), .out_data({out_error, out_data}));

`ifdef FORMAL
    always @(posedge clk)
        if (!rst && rvalid && !stop) fifo_never_overflows: assert (room);
`endif
endmodule
