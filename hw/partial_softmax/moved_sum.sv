// SPDX-License-Identifier: Apache-2.0
// running + block * 2^-below in float32, rounded once, halves to even: one step of the merging
// (contract, section 16). Subnormal numbers do not come up and count as zero. Latency 6.
module moved_sum (
    input  logic        clk,
    input  logic [31:0] running,
    input  logic [31:0] block,
    input  logic [ 5:0] below,
    output logic [31:0] out
);
  logic [31:0] large1, small1, moved0, running0;
  logic [ 7:0] lowered;
  assign lowered = block[30:23] - 8'(below);
  logic [7:0] apart;
  logic [26:0] left2, right2;
  logic sticky2, minus2, sign2, sign3, sign4;
  logic [7:0] power2, power3, power4;
  logic [28:0] total3, normal4;
  logic [4:0] zeros;
  logic [23:0] small_mantissa;
  logic [52:0] wide;
  integer i;
  assign apart = large1[30:23] - small1[30:23];
  assign small_mantissa = {|small1[30:23], small1[22:0]};
  assign wide = {small_mantissa, 29'd0} >> (apart > 8'd28 ? 5'd28 : apart[4:0]);
  always_comb begin
    zeros = 5'd29;
    for (i = 0; i < 29; i = i + 1) if (total3[i]) zeros = 5'(28 - i);
  end
  logic [24:0] rounded;
  assign rounded = {1'b0, normal4[28:5]} + 25'(normal4[4] && (normal4[5] || |normal4[3:0]));
  always_ff @(posedge clk) begin
    running0 <= running;
    moved0 <= (block[30:23] <= 8'(below)) ? 32'd0 : {block[31], lowered, block[22:0]};

    large1 <= (running0[30:0] >= moved0[30:0]) ? running0 : moved0;
    small1 <= (running0[30:0] >= moved0[30:0]) ? moved0 : running0;

    left2 <= {|large1[30:23], large1[22:0], 3'd0};
    right2 <= (apart > 8'd27) ? 27'd0 : wide[52:26];
    sticky2 <= (apart > 8'd27) ? |small_mantissa : |wide[25:0];
    minus2 <= large1[31] != small1[31];
    sign2 <= large1[31];
    power2 <= large1[30:23];

    total3 <= minus2 ? {1'b0, left2, 1'b0} - {1'b0, right2, sticky2}
                     : {1'b0, left2, 1'b0} + {1'b0, right2, sticky2};
    sign3 <= sign2;
    power3 <= power2;

    normal4 <= total3 << zeros;
    sign4 <= sign3 && |total3;
    power4 <= (|total3) ? power3 + 8'd1 - 8'(zeros) : 8'd0;

    out <= {sign4, power4 + 8'(rounded[24]), rounded[24] ? 23'd0 : rounded[22:0]};
  end
endmodule
