// SPDX-License-Identifier: Apache-2.0
// One launch from ap_start to ap_continue. However it ends, open reads are drained before the
// processes are cleared: after ap_done no beat of this launch is on the bus.
module launch (
    input  logic clk,
    input  logic rst,
    input  logic ap_start,
    input  logic ap_continue,
    output logic ap_done,
    output logic ap_ready,
    output logic ap_idle,
    output logic go,        // one cycle: the processes start
    input  logic finished,  // the writer has nothing more to say
    output logic stop,      // readers: no new bursts
    input  logic drained,   // readers: no burst open
    output logic clear      // one cycle: everything back to its reset state
);
    localparam logic [2:0] IDLE = 0, RUN = 1, DRAIN = 2, CLEAR = 3, DONE = 4;
    logic [2:0] state;

    assign ap_idle = (state == IDLE) && !ap_start;
    assign ap_done = (state == CLEAR) || (state == DONE);
    assign go = (state == IDLE) && ap_start;
    assign stop = (state == DRAIN) || (state == CLEAR);
    assign clear = state == CLEAR;
    assign ap_ready = clear;

    always_ff @(posedge clk) begin
        if (rst) state <= IDLE;
        else case (state)
            IDLE: if (ap_start) state <= RUN;
            RUN: if (finished) state <= drained ? CLEAR : DRAIN;
            DRAIN: if (drained) state <= CLEAR;
            CLEAR: state <= DONE;
            default: if (ap_continue) state <= IDLE;
        endcase
    end
endmodule
