// SPDX-License-Identifier: Apache-2.0
// L' of one inner product (contract, section 5): shift by s + t - 6 rounding half up, clamp,
// add the head's addend. Latency 7; the addend is taken in the last of these cycles.
module align_unit (
    input  logic               clk,
    input  logic signed [22:0] product,
    input  logic signed [ 7:0] query_exponent,
    input  logic        [ 7:0] token_exponent,
    input  logic signed [31:0] addend,          // six cycles later
    output logic signed [32:0] aligned
);
  logic signed [10:0] shift;
  logic signed [22:0] p1, p2;
  logic [5:0] right2, right3, right4;
  logic [39:0] coarse;
  logic [27:0] middle;
  logic [24:0] fine;  // with one fraction bit
  logic [22:0] beyond;
  logic overflow4, overflow5, negative3, negative4, negative5, half;
  logic signed [23:0] clamped;
  logic [72:0] field;
  logic [22:0] magnitude;

  // P with 25 fraction bits, sign extended so that 48 places to the right are there.
  assign field = {{25{p2[22]}}, p2, 25'd0};
  // Bits of |P| (negative: of -P - 1) that a left shift may lose; the lowest stands for -1 itself.
  assign magnitude = {p2[21:0] ^ {22{p2[22]}}, p2[22]};

  always_ff @(posedge clk) begin
    shift <= 11'(query_exponent) + $signed({3'd0, token_exponent}) - 11'sd6;
    p1 <= product;

    if (shift > 24) right2 <= 6'd0;
    else if (shift < -24) right2 <= 6'd48;
    else right2 <= 6'd24 - shift[5:0];
    p2 <= p1;

    case (right2[5:4])
      2'd0: coarse <= field[39:0];
      2'd1: coarse <= field[55:16];
      2'd2: coarse <= field[71:32];
      default: coarse <= {{15{p2[22]}}, field[72:48]};
    endcase
    for (int i = 0; i < 23; i = i + 1) beyond[i] <= magnitude[i] && (32'(right2) <= i);
    right3 <= right2;
    negative3 <= p2[22];

    case (right3[3:2])
      2'd0: middle <= coarse[27:0];
      2'd1: middle <= coarse[31:4];
      2'd2: middle <= coarse[35:8];
      default: middle <= coarse[39:12];
    endcase
    right4 <= right3;
    overflow4 <= |beyond;
    negative4 <= negative3;

    case (right4[1:0])
      2'd0: fine <= middle[24:0];
      2'd1: fine <= middle[25:1];
      2'd2: fine <= middle[26:2];
      default: fine <= middle[27:3];
    endcase
    overflow5 <= overflow4;
    negative5 <= negative4;

    if (overflow5) clamped <= negative5 ? -24'sd8388607 : 24'sd8388607;
    else if (fine[24:1] == 24'h800000) clamped <= -24'sd8388607;
    else clamped <= fine[24:1];
    half <= fine[0] && !overflow5;

    aligned <= 33'(clamped) + 33'(addend) + $signed({32'd0, half});
  end
endmodule
