// SPDX-License-Identifier: Apache-2.0
// Weight of a coded token relative to a block's 2^reference, and its addend relative to 2^top
// (contract, section 16). Reference and top belong to the block and are held. Latency 6.
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
  logic signed [23:0] limited1;
  logic signed [25:0] relative2;
  logic signed [17:0] power2;
  logic [4:0] exponent1, exponent2;
  logic live3, live4, live5;
  logic [5:0] below3;
  logic signed [7:0] place3, place4, place5;
  logic [22:0] fraction3;
  logic [23:0] mantissa3, mantissa4;
  logic signed [8:0] above;  // U + 8
  logic signed [9:0] shift4;
  logic [40:0] term4, term5;
  logic [24:0] doubled5;

  assign power2    = relative2[25:8];
  assign mantissa3 = {1'b1, fraction3};
  power_table of_rest (
      .clk(clk),
      .place(relative2[7:0]),
      .fraction(fraction3)
  );
  always_ff @(posedge clk) begin
    above <= 9'(top) + 9'sd8;

    if (aligned > 32'sd8388607) limited1 <= 24'sd8388607;
    else if (aligned < -32'sd8388607) limited1 <= -24'sd8388607;
    else limited1 <= aligned[23:0];
    exponent1 <= exponent;

    relative2 <= limited1 - $signed({reference, 8'd0});
    exponent2 <= exponent1;

    live3 <= power2 >= -18'sd40;
    below3 <= 6'(-power2);
    place3 <= power2[7:0] + $signed({3'd0, exponent2});

    live4 <= live3;
    place4 <= place3;
    term4 <= {mantissa3, 17'd0} >> below3;
    mantissa4 <= mantissa3;
    // 2^top is above every live place, so this is 9 at least.
    shift4 <= 10'(above) - 10'(place3);

    live5 <= live4;
    place5 <= place4;
    term5 <= term4;
    doubled5 <= (shift4 > 10'sd25) ? 25'd0 : 25'({mantissa4, 1'b0} >> shift4[4:0]);

    live <= live5;
    place <= place5;
    term <= live5 ? term5 : '0;
    addend <= live5 ? 15'((doubled5 + 25'd1) >> 1) : '0;
  end
endmodule
