// SPDX-License-Identifier: Apache-2.0
// The register map that Vitis HLS gives a kernel (control protocol ap_ctrl_chain):
//   0x00 bit 0 ap_start, 1 ap_done (stays until ap_continue), 2 ap_idle, 3 ap_ready (cleared by
//        reading), 4 ap_continue (clears itself), 7 auto_restart, 9 interrupt
//   0x04 bit 0 global interrupt enable; 0x08 enable, 0x0c status: bit 0 done, bit 1 ready (status
//        bits toggle where a one is written)
//   0x10 + 0x0c * i: pointer i, low and high word; then 8 bytes per scalar.
module control_s_axi #(
    parameter int ADDRESS = 7,
    parameter int POINTERS = 5,
    parameter int SCALARS = 3
) (
    input  logic                   clk,
    input  logic                   rst,
    input  logic                   awvalid,
    output logic                   awready,
    input  logic [ADDRESS-1:0]     awaddr,
    input  logic                   wvalid,
    output logic                   wready,
    input  logic [31:0]            wdata,
    input  logic [3:0]             wstrb,
    output logic                   bvalid,
    input  logic                   bready,
    output logic [1:0]             bresp,
    input  logic                   arvalid,
    output logic                   arready,
    input  logic [ADDRESS-1:0]     araddr,
    output logic                   rvalid,
    input  logic                   rready,
    output logic [31:0]            rdata,
    output logic [1:0]             rresp,
    output logic [POINTERS*64-1:0] pointers,
    output logic [SCALARS*32-1:0]  scalars,
    output logic                   ap_start,
    input  logic                   ap_done,
    input  logic                   ap_ready,  // one cycle
    input  logic                   ap_idle,
    output logic                   ap_continue,
    output logic                   interrupt
);
    localparam int FIRST_SCALAR = 16 + 12 * POINTERS;

    // One address and one word at a time, as the generated slave has it.
    logic [ADDRESS-1:0] address;
    logic have_address, write, read;
    logic [31:0] mask;
    assign awready = !have_address && !bvalid;
    assign wready = have_address && !bvalid;
    assign write = wvalid && wready;
    assign bresp = 2'b00;
    assign mask = {{8{wstrb[3]}}, {8{wstrb[2]}}, {8{wstrb[1]}}, {8{wstrb[0]}}};
    assign arready = !rvalid;
    assign read = arvalid && arready;
    assign rresp = 2'b00;

    logic auto_restart, ready_seen, done_before;
    logic global_enable;
    logic [1:0] enable, status;
    assign interrupt = global_enable && (status != 0);

    always_ff @(posedge clk) begin
        if (rst) begin
            have_address <= 1'b0;
            bvalid <= 1'b0;
            rvalid <= 1'b0;
        end else begin
            if (awvalid && awready) have_address <= 1'b1;
            else if (write) have_address <= 1'b0;
            if (write) bvalid <= 1'b1;
            else if (bready) bvalid <= 1'b0;
            if (read) rvalid <= 1'b1;
            else if (rready) rvalid <= 1'b0;
        end
        if (awvalid && awready) address <= {awaddr[ADDRESS-1:2], 2'b00};
    end

    always_ff @(posedge clk) begin
        if (rst) begin
            ap_start <= 1'b0;
            ap_continue <= 1'b0;
            auto_restart <= 1'b0;
            ready_seen <= 1'b0;
            done_before <= 1'b0;
            global_enable <= 1'b0;
            enable <= 2'b00;
            status <= 2'b00;
        end else begin
            ap_continue <= write && address == 'h00 && wstrb[0] && wdata[4];
            if (write && address == 'h00 && wstrb[0] && wdata[0]) ap_start <= 1'b1;
            else if (ap_ready) ap_start <= auto_restart;
            if (write && address == 'h00 && wstrb[0]) auto_restart <= wdata[7];
            if (ap_ready) ready_seen <= 1'b1;
            else if (read && {araddr[ADDRESS-1:2], 2'b00} == 'h00) ready_seen <= 1'b0;
            if (write && address == 'h04 && wstrb[0]) global_enable <= wdata[0];
            if (write && address == 'h08 && wstrb[0]) enable <= wdata[1:0];
            done_before <= ap_done;
            if (ap_done && !done_before && enable[0]) status[0] <= 1'b1;
            else if (write && address == 'h0c && wstrb[0]) status[0] <= status[0] ^ wdata[0];
            if (ap_ready && enable[1]) status[1] <= 1'b1;
            else if (write && address == 'h0c && wstrb[0]) status[1] <= status[1] ^ wdata[1];
        end
    end

    // Arguments.
    integer i;
    always_ff @(posedge clk) begin
        if (rst) begin
            pointers <= '0;
            scalars <= '0;
        end else if (write) begin
            for (i = 0; i < POINTERS; i = i + 1) begin
                if (address == 16 + 12 * i)
                    pointers[64*i +: 32] <= (pointers[64*i +: 32] & ~mask) | (wdata & mask);
                if (address == 20 + 12 * i)
                    pointers[64*i+32 +: 32] <= (pointers[64*i+32 +: 32] & ~mask) | (wdata & mask);
            end
            for (i = 0; i < SCALARS; i = i + 1)
                if (address == FIRST_SCALAR + 8 * i)
                    scalars[32*i +: 32] <= (scalars[32*i +: 32] & ~mask) | (wdata & mask);
        end
    end

    // Reading.
    logic [ADDRESS-1:0] wanted;
    logic [31:0] word;
    integer j;
    assign wanted = {araddr[ADDRESS-1:2], 2'b00};
    always_comb begin
        word = 32'd0;
        if (wanted == 'h00)
            word = {22'd0, interrupt, 1'b0, auto_restart, 3'd0, ready_seen, ap_idle, ap_done,
                    ap_start};
        if (wanted == 'h04) word = {31'd0, global_enable};
        if (wanted == 'h08) word = {30'd0, enable};
        if (wanted == 'h0c) word = {30'd0, status};
        for (j = 0; j < POINTERS; j = j + 1) begin
            if (wanted == 16 + 12 * j) word = pointers[64*j +: 32];
            if (wanted == 20 + 12 * j) word = pointers[64*j+32 +: 32];
        end
        for (j = 0; j < SCALARS; j = j + 1)
            if (wanted == FIRST_SCALAR + 8 * j) word = scalars[32*j +: 32];
    end
    always_ff @(posedge clk) if (read) rdata <= word;
endmodule
