// SPDX-License-Identifier: Apache-2.0
// The key port: reads segment after segment without a pause between them, and knows whose beat
// came with a bus error. From that beat on nothing reaches the core.
module key_reader #(
    parameter int DEPTH = 512
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         stop,
    output logic         idle,
    input  logic         command_valid,
    output logic         command_ready,
    input  logic [31:0]  command_index,   // the segment
    input  logic [57:0]  command_beat,
    input  logic [31:0]  command_beats,
    input  logic [16:0]  command_rows,
    input  logic [31:0]  command_stride,
    input  logic [31:0]  command_total,   // rows times beats
    output logic         arvalid,
    input  logic         arready,
    output logic [63:0]  araddr,
    output logic [7:0]   arlen,
    input  logic         rvalid,
    output logic         rready,
    input  logic [511:0] rdata,
    input  logic         rlast,
    input  logic [1:0]   rresp,
    output logic         key_valid,
    input  logic         key_ready,
    output logic [511:0] key_data,
    output logic         fault,
    output logic [31:0]  fault_index
);
    logic read_ready, owner_ready, beat_valid, beat_error, owner_valid, owner_last;
    logic [31:0] owner_index, owner_total, passed;

    assign command_ready = read_ready && owner_ready;
    axi_read #(.DEPTH(DEPTH)) read (
        .clk(clk), .rst(rst), .stop(stop), .idle(idle),
        .command_valid(command_valid && owner_ready), .command_ready(read_ready),
        .command_beat(command_beat), .command_beats(command_beats),
        .command_rows(command_rows), .command_stride(command_stride),
        .arvalid(arvalid), .arready(arready), .araddr(araddr), .arlen(arlen),
        .rvalid(rvalid), .rready(rready), .rdata(rdata), .rlast(rlast), .rresp(rresp),
        .out_valid(beat_valid), .out_ready(key_ready && owner_valid && !beat_error && !fault),
        .out_data(key_data), .out_error(beat_error));

    // Whose beats leave the FIFO. Twice as deep as the commands: those have left before.
    queue #(.WIDTH(64), .DEPTH(8)) owners (
        .clk(clk), .rst(rst),
        .in_valid(command_valid && read_ready), .in_ready(owner_ready),
        .in_data({command_index, command_total}),
        .out_valid(owner_valid), .out_ready(key_valid && key_ready && owner_last),
        .out_data({owner_index, owner_total}));

    assign key_valid = beat_valid && owner_valid && !beat_error && !fault;
    assign owner_last = passed + 32'd1 == owner_total;

    always_ff @(posedge clk) begin
        if (rst) begin
            passed <= 32'd0;
            fault <= 1'b0;
        end else begin
            if (key_valid && key_ready) passed <= owner_last ? 32'd0 : passed + 32'd1;
            if (beat_valid && owner_valid && beat_error) fault <= 1'b1;
        end
        if (!fault) fault_index <= owner_index;
    end
endmodule
