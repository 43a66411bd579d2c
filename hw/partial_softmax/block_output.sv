// SPDX-License-Identifier: Apache-2.0
// O of one channel: (W * 2^-40 * mean + sum * 2^(top - 15)) * 2^(c - 14), rounded once to float32
// (contract, section 16), where float32(W) is weight * 2^weight_power. All operands have their place
// in 96 bits of fixed point, so none is aligned to another. Latency 9.
module block_output (
    input  logic               clk,
    input  logic        [23:0] weight,
    input  logic        [ 4:0] weight_power,
    input  logic signed [24:0] mean,
    input  logic signed [24:0] sum,
    input  logic signed [ 7:0] top,
    input  logic signed [ 7:0] channel_exponent,
    output logic        [31:0] out
);
  logic [23:0] weight1;
  logic signed [24:0] mean1, sum1, sum2;
  logic [4:0] power1, power2, power3;
  logic [6:0] rise1, rise2;
  logic signed [49:0] product2, product3;
  logic signed [95:0] distance3, distance4, means4, total5;
  logic sign6, sign7, sign8, none8;
  logic [95:0] size6, normal7;
  logic [6:0] zeros6, zeros7;
  logic [24:0] rounded8;
  logic signed [9:0] power8;
  logic signed [7:0] channel[1:8];
  integer i, place;

  always_comb begin
    zeros6 = 7'd96;
    for (place = 0; place < 96; place = place + 1) if (size6[place]) zeros6 = 7'(95 - place);
  end
  always_ff @(posedge clk) begin
    channel[1] <= channel_exponent;
    for (i = 2; i < 9; i = i + 1) channel[i] <= channel[i-1];

    weight1 <= weight;
    mean1 <= mean;
    sum1 <= sum;
    power1 <= weight_power;
    // The unit is 2^-54: top is -39 at least.
    rise1 <= 7'(top + 8'sd39);

    product2 <= $signed({1'b0, weight1}) * mean1;
    sum2 <= sum1;
    power2 <= power1;
    rise2 <= rise1;

    product3 <= product2;
    distance3 <= 96'(sum2) <<< rise2;
    power3 <= power2;

    means4 <= 96'(product3) <<< (7'd14 + 7'(power3));
    distance4 <= distance3;

    total5 <= means4 + distance4;

    sign6 <= total5[95];
    size6 <= total5[95] ? -total5 : total5;

    normal7 <= size6 << zeros6;
    zeros7 <= zeros6;
    sign7 <= sign6;

    sign8 <= sign7;
    none8 <= !normal7[95];
    rounded8 <= {1'b0, normal7[95:72]} + 25'(normal7[71] && (normal7[72] || |normal7[70:0]));
    // The leading bit stands for 2^(95 - zeros - 54).
    power8 <= 10'sd41 - 10'(zeros7);

    out <= none8 ? 32'd0
        : {sign8, 8'(power8 + 10'(channel[8]) + 10'sd113 + 10'(rounded8[24])),
           rounded8[24] ? 23'd0 : rounded8[22:0]};
  end
endmodule
