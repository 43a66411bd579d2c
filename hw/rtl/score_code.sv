// SPDX-License-Identifier: Apache-2.0
// The monotone 16-bit score code of a sum (contract, section 7). Latency 5.
module score_code #(
    parameter int RULE = 1,  // 0 raw_sum: signed 40 bits; 1 weight_sum: unsigned, saturates
    parameter int WIDTH = 57
) (
    input  logic             clk,
    input  logic [WIDTH-1:0] value,
    input  logic             invalid,
    output logic [     15:0] code
);
  logic [47:0] start;
  logic [10:0] after4;
  logic [5:0] zeros2, zeros3, zeros4;
  logic [9:0] low2, low3, low4;
  logic small2, small3, small4;
  logic negative1, negative2, negative3, negative4, bad1, bad2, bad3, bad4;
  logic [15:0] size;

  generate
    if (RULE != 0) begin : g_weight
      always_ff @(posedge clk) begin
        start <= (|value[WIDTH-1:48]) ? 48'hFFFF_FFFF_FFFF : value[47:0];
        negative1 <= 1'b0;
      end
    end else begin : g_raw
      always_ff @(posedge clk) begin
        start <= 48'(value[WIDTH-2:0] ^ {(WIDTH - 1) {value[WIDTH-1]}});
        negative1 <= value[WIDTH-1];
      end
    end
  endgenerate

  // Left until the leading one is on top: by 32 and 16, by 8 and 4, by 2 and 1.
  // Of the first two steps the thirds of a sum are looked at side by side.
  wire high = |start[47:32];
  wire middle = |start[31:16];
  wire z32 = !high && !middle;
  wire z16 = !high && (middle || ~|start[15:0]);
  wire [25:0] n16 = high ? start[47:22] : middle ? start[31:6] : {start[15:0], 10'd0};
  logic [25:0] held2;
  wire z8 = ~|held2[25:18];
  wire [17:0] n8 = z8 ? held2[17:0] : held2[25:8];
  wire z4 = ~|n8[17:14];
  wire [13:0] n4 = z4 ? n8[13:0] : n8[17:4];
  logic [13:0] held3;
  wire z2 = ~|held3[13:12];
  wire [11:0] n2 = z2 ? held3[11:0] : held3[13:2];
  wire z1 = ~n2[11];

  always_ff @(posedge clk) begin
    bad1 <= invalid;

    held2 <= n16;
    zeros2 <= {z32, z16, 4'd0};
    small2 <= ~|start[47:10];
    low2 <= start[9:0];
    {negative2, bad2} <= {negative1, bad1};

    held3 <= n4;
    zeros3 <= {zeros2[5:4], z8, z4, 2'd0};
    {small3, low3, negative3, bad3} <= {small2, low2, negative2, bad2};

    after4 <= z1 ? n2[10:0] : n2[11:1];
    zeros4 <= {zeros3[5:2], z2, z1};
    {small4, low4, negative4, bad4} <= {small3, low3, negative3, bad3};

    if (bad4) code <= 16'd0;
    else if (RULE != 0) code <= size + 16'd1;
    else code <= negative4 ? {1'b0, ~size[14:0]} : {1'b1, size[14:0]};
  end
  assign size = small4 ? {6'd0, low4} : {6'd38 - zeros4, after4[9:0]};
endmodule
