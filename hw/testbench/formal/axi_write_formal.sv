// SPDX-License-Identifier: Apache-2.0
// The write engine: any one beat that went in leaves once, in order, at its address, and its
// burst's response carries its mark and tag. Address and data channels may be taken in any order.
module axi_write_formal #(
    parameter int BURST = 4,
    parameter int OUTSTANDING = 2,
    parameter int DEPTH = 8,
    parameter int CLOSED = 2
) (
    input logic        clk,
    input logic        in_valid,
    input logic [7:0]  in_beat,
    input logic [3:0]  in_data,
    input logic        in_flush,
    input logic [2:0]  in_tag,
    input logic        close,
    input logic        awready,
    input logic        wready,
    input logic        answers
);
    localparam int SHIFT = 6;
    localparam int ADDRESS = 8 + SHIFT;
    localparam int PAGE = BURST * 64;
    logic rst = 1'b1;
    always @(posedge clk) rst <= 1'b0;

    logic busy, in_ready, awvalid, wvalid, wlast, bvalid, bready;
    logic done_valid, done_marked, done_error;
    logic [ADDRESS-1:0] awaddr;
    logic [7:0] awlen;
    logic [3:0] wdata;
    logic [2:0] done_tag;
    axi_write #(
        .DATA(4), .ADDRESS(ADDRESS), .SHIFT(SHIFT), .BURST(BURST), .OUTSTANDING(OUTSTANDING),
        .DEPTH(DEPTH), .CLOSED(CLOSED), .TAG(3)
    ) dut (.bresp(2'b00), .*);

    // Counters of beats and bursts at each place.
    logic [5:0] put = 0, addressed = 0, sent = 0;
    logic [4:0] addresses = 0, lasts = 0, dones = 0;
    assign bvalid = answers && (dones < addresses) && (dones < lasts) && !rst;

    (* anyconst *) logic [5:0] watched;
    logic [7:0] beat;
    logic [3:0] data;
    logic [2:0] tag;
    logic flush;
    logic beat_known = 1'b0, ends_known = 1'b0, ends, last_known = 1'b0, last;
    logic [4:0] burst;
    logic aw_waited = 1'b0, w_waited = 1'b0, w_last, is_watched_burst;
    logic [ADDRESS-1:0] address;
    logic [7:0] length;
    logic [3:0] word;
    always @(posedge clk) begin
        if (!rst) begin
            aw_waited <= awvalid && !awready;
            address <= awaddr;
            length <= awlen;
            w_waited <= wvalid && !wready;
            word <= wdata;
            w_last <= wlast;
            if (in_valid && in_ready) begin
                put <= put + 6'd1;
                if (put == watched) begin
                    beat <= in_beat;
                    data <= in_data;
                    tag <= in_tag;
                    flush <= in_flush;
                    beat_known <= 1'b1;
                end
            end
            if (awvalid && awready) begin
                addressed <= addressed + awlen + 6'd1;
                addresses <= addresses + 5'd1;
                if (addressed <= watched && watched <= addressed + awlen) begin
                    burst <= addresses;
                    ends <= watched == addressed + awlen;
                    ends_known <= 1'b1;
                end
            end
            if (wvalid && wready) begin
                sent <= sent + 6'd1;
                if (wlast) lasts <= lasts + 5'd1;
                if (sent == watched) begin
                    last <= wlast;
                    last_known <= 1'b1;
                end
            end
            if (done_valid) dones <= dones + 5'd1;

            if (aw_waited) aw_stays: assert (awvalid && awaddr == address && awlen == length);
            if (w_waited) w_stays: assert (wvalid && wdata == word && wlast == w_last);
            if (awvalid) begin
                no_page_crossed: assert (awaddr / PAGE == (awaddr + (awlen << SHIFT)) / PAGE);
                no_long_burst: assert (awlen < BURST);
                if (addressed <= watched && watched <= addressed + awlen)
                    beat_at_its_address: assert (beat_known
                        && awaddr == {beat - (watched[5:0] - addressed), {SHIFT{1'b0}}});
            end
            if (wvalid && sent == watched)
                no_beat_lost_or_out_of_order: assert (beat_known && wdata == data);
            if (ends_known && last_known) wlast_ends_the_burst: assert (ends == last);
            if (last_known && flush) marked_beat_ends_its_burst: assert (last);
            if (done_valid && ends_known && ends && dones == burst)
                response_has_its_tag: assert (done_tag == tag && done_marked == flush);
            not_too_many_open: assert (addresses - dones <= OUTSTANDING);
            always_ready: assert (bready);
            if (!busy) all_answered: assert (put == sent && dones == lasts && dones == addresses);
            assume (put < 6'd20);
            three_bursts_done: cover (dones == 5'd2 && sent == 6'd3);
        end
    end
endmodule
