// SPDX-License-Identifier: Apache-2.0
// Sums of 16 packed products, apart again: exact while eight products of a field sum to less than
// 2^17, which |b| <= 127 and 8-bit codes grant. Latency 4.
module pair_sum #(
    parameter int PAIRED = 1,
    parameter int WIDTH  = (PAIRED != 0) ? 36 : 19
) (
    input  logic                       clk,
    input  logic        [16*WIDTH-1:0] products,
    output logic signed [        18:0] low,
    output logic signed [        18:0] high
);
  logic [8*WIDTH-1:0] twos;
  logic [4*WIDTH-1:0] fours;
  logic [2*WIDTH-1:0] eights;
  always_ff @(posedge clk) begin
    for (int j = 0; j < 8; j = j + 1) begin
      twos[j*WIDTH+:WIDTH] <= products[2*j*WIDTH+:WIDTH] + products[(2*j+1)*WIDTH+:WIDTH];
    end
    for (int j = 0; j < 4; j = j + 1) begin
      fours[j*WIDTH+:WIDTH] <= twos[2*j*WIDTH+:WIDTH] + twos[(2*j+1)*WIDTH+:WIDTH];
    end
    for (int j = 0; j < 2; j = j + 1) begin
      eights[j*WIDTH+:WIDTH] <= fours[2*j*WIDTH+:WIDTH] + fours[(2*j+1)*WIDTH+:WIDTH];
    end
  end
  generate
    if (PAIRED != 0) begin : g_fields
      pair_fields fields (
          .clk(clk),
          .first(eights[35:0]),
          .second(eights[71:36]),
          .low(low),
          .high(high)
      );
    end else begin : g_single
      always_ff @(posedge clk) low <= eights[18:0] + eights[WIDTH+:19];
      assign high = '0;
    end
  endgenerate
endmodule
