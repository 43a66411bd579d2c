// SPDX-License-Identifier: Apache-2.0
// Weight of a coded token relative to a block's 2^reference, and its addend relative to 2^top
// (contract, section 16). Reference and top belong to the block. Latency 4.
module coded_weight (
    input  logic               clk,
    input  logic signed [31:0] aligned,    // L'
    input  logic signed [16:0] reference,  // R
    input  logic        [ 4:0] exponent,   // t
    input  logic signed [ 7:0] top,        // U
    output logic signed [ 7:0] place,      // I + t, where the token is live
    output logic               live,
    output logic        [40:0] term,       // of W
    output logic        [14:0] addend
);
  logic signed [23:0] limited;
  logic signed [25:0] relative;
  logic signed [17:0] power;
  logic signed [7:0] place1, place2, place3;
  logic signed [8:0] lift;
  logic [ 4:0] exponent1;
  logic [ 5:0] below2;
  logic [ 5:0] shift2;
  logic [22:0] fraction;
  logic [23:0] mantissa;
  logic live2, live3;
  logic [40:0] term3;
  logic [24:0] doubled3;

  assign relative = limited - $signed({reference, 8'd0});
  assign power    = relative[25:8];
  assign place1   = power[7:0] + $signed({3'd0, exponent1});
  assign lift     = 9'(top) - 9'(place1);
  assign mantissa = {1'b1, fraction};
  power_table of_rest (
      .clk(clk),
      .place(relative[7:0]),
      .fraction(fraction)
  );
  always_ff @(posedge clk) begin
    if (aligned > 32'sd8388607) limited <= 24'sd8388607;
    else if (aligned < -32'sd8388607) limited <= -24'sd8388607;
    else limited <= aligned[23:0];
    exponent1 <= exponent;

    live2 <= power >= -18'sd40;
    below2 <= 6'(-power);
    place2 <= place1;
    // 2^top is above every live place, so the shift is 9 at least; from 25 on nothing is left.
    shift2 <= (lift > 9'sd54) ? 6'd62 : 6'(lift + 9'sd8);

    live3 <= live2;
    place3 <= place2;
    term3 <= {mantissa, 17'd0} >> below2;
    doubled3 <= (shift2 > 6'd25) ? 25'd0 : 25'({mantissa, 1'b0} >> shift2);

    live <= live3;
    place <= place3;
    term <= live3 ? term3 : '0;
    addend <= live3 ? 15'((doubled3 + 25'd1) >> 1) : '0;
  end
endmodule
