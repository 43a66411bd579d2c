// SPDX-License-Identifier: Apache-2.0
// The read engine before a memory that answers when it likes: each beat it returns is its own
// address, so the stream that comes out must be the addresses of the commands, in order.
module axi_read_formal #(
    parameter int SHIFT = 6,
    parameter int BURST = 4,
    parameter int OUTSTANDING = 2,
    parameter int DEPTH = 8,
    parameter int PAGE = 4 * 64,     // bytes no burst may cross
    parameter int ORDER = 1          // 0: addresses only, for bursts too long to wait for
) (
    input logic        clk,
    input logic        command_valid,
    input logic [15:0] command_beat,
    input logic [31:0] command_beats,
    input logic [16:0] command_rows,
    input logic [31:0] command_stride,
    input logic        arready,
    input logic        offers,
    input logic        out_ready,
    input logic        stop
);
    localparam int ADDRESS = 16 + SHIFT;
    logic rst = 1'b1;
    always @(posedge clk) rst <= 1'b0;

    logic idle, command_ready, arvalid, rready, out_valid, out_error;
    logic [ADDRESS-1:0] araddr;
    logic [7:0] arlen;
    logic rvalid, rlast;
    logic [15:0] rdata, out_data;
    axi_read #(
        .DATA(16), .ADDRESS(ADDRESS), .SHIFT(SHIFT), .BURST(BURST), .OUTSTANDING(OUTSTANDING),
        .DEPTH(DEPTH), .COMMANDS(2)
    ) dut (.rresp(2'b00), .*);

    always @(*) begin
        assume (command_beats != 0 && command_rows != 0);
        assume (!(ORDER != 0 && stop));
        if (ORDER != 0) assume (command_beats < 4 && command_rows < 3 && command_stride < 16);
    end
    logic command_waited = 1'b0, stopped = 1'b0;
    always @(posedge clk) begin
        stopped <= stop;
        if (stopped) assume (stop);
    end

    // Memory: bursts in order, a beat when `offers` says so; an offered beat stays.
    logic burst_valid, burst_room, offered = 1'b0;
    logic [15:0] burst_beat;
    logic [7:0] burst_length, sent = 0;
    queue #(.WIDTH(24), .DEPTH(4)) bursts (
        .clk(clk), .rst(rst), .in_valid(arvalid && arready), .in_ready(burst_room),
        .in_data({araddr[SHIFT+:16], arlen}),
        .out_valid(burst_valid), .out_ready(rvalid && rready && rlast),
        .out_data({burst_beat, burst_length}));
    assign rvalid = burst_valid && (offers || offered) && !rst;
    assign rdata = burst_beat + {8'd0, sent};
    assign rlast = sent == burst_length;
    always @(posedge clk) begin
        offered <= rvalid && !rready;
        if (rvalid && rready) sent <= rlast ? 8'd0 : sent + 8'd1;
    end

    // What must come out.
    logic want_valid, want_room, first;
    logic [15:0] want_beat;
    logic [3:0] want_beats;
    logic [1:0] want_rows;
    logic [15:0] want_stride, row = 0;
    logic [3:0] column = 0;
    logic [1:0] rows_done = 0;
    queue #(.WIDTH(38), .DEPTH(8)) wants (
        .clk(clk), .rst(rst), .in_valid(command_valid && command_ready), .in_ready(want_room),
        .in_data({command_beat, command_beats[3:0], command_rows[1:0], command_stride[15:0]}),
        .out_valid(want_valid),
        .out_ready(out_valid && out_ready && column + 4'd1 == want_beats
            && rows_done + 2'd1 == want_rows),
        .out_data({want_beat, want_beats, want_rows, want_stride}));
    always @(posedge clk)
        if (!rst && out_valid && out_ready) begin
            if (column + 4'd1 == want_beats) begin
                column <= 0;
                rows_done <= rows_done + 2'd1;
                row <= row + want_stride;
                if (rows_done + 2'd1 == want_rows) begin
                    rows_done <= 0;
                    row <= 0;
                end
            end else column <= column + 4'd1;
        end

    logic waited = 1'b0;
    logic [ADDRESS-1:0] address;
    logic [7:0] length;
    logic [4:0] open = 0;
    logic [8:0] asked = 0, got = 0;
    always @(posedge clk) begin
        if (!rst) begin
            waited <= arvalid && !arready;
            address <= araddr;
            length <= arlen;
            open <= open + (arvalid && arready) - (rvalid && rready && rlast);
            asked <= asked + ((arvalid && arready) ? arlen + 9'd1 : 9'd0);
            got <= got + (rvalid && rready);
            if (waited) ar_stays: assert (arvalid && araddr == address && arlen == length);
            if (arvalid) begin
                no_page_crossed: assert (araddr / PAGE == (araddr + (arlen << SHIFT)) / PAGE);
                no_long_burst: assert (arlen < BURST);
            end
            not_too_many_open: assert (open <= OUTSTANDING);
            always_ready: assert (rready);
            if (idle) idle_is_idle: assert (open == 0 && !arvalid);
            if (stopped && !waited) no_burst_after_stop: assert (!arvalid);
            if (ORDER != 0) begin
                assume (burst_room && want_room);
                if (out_valid) no_beat_from_nowhere: assert (want_valid);
                if (out_valid) no_beat_lost_or_out_of_order: assert (out_data == want_beat + row
                    + {12'd0, column});
                two_commands_done: cover (got == 9'd4 && out_valid && rows_done == 1);
            end else begin
                two_bursts_asked: cover (arvalid && asked == 9'd3);
            end
        end
    end
endmodule
