// SPDX-License-Identifier: Apache-2.0
// Two inner products of 16 channels from 16 multipliers: two factors share one word,
// a_low + a_high * 2^18. Sums of eight products with |b| <= 127 and 8-bit codes keep the 18-bit
// fields apart exactly. Latency 8.
module dot_pairs #(
    parameter int PAIRED = 1  // 0: a_high and high are not used
) (
    input  logic                clk,
    input  logic        [127:0] a_low,
    input  logic        [127:0] a_high,
    input  logic        [127:0] b,
    output logic signed [ 18:0] low,
    output logic signed [ 18:0] high
);
  localparam int AW = (PAIRED != 0) ? 27 : 8;
  localparam int PW = (PAIRED != 0) ? 36 : 19;
  logic [16*PW-1:0] products;
  logic [ 8*PW-1:0] twos;
  logic [ 4*PW-1:0] fours;
  logic [ 2*PW-1:0] eights;

  genvar i;
  generate
    for (i = 0; i < 16; i = i + 1) begin : g_product
      logic signed [AW-1:0] left, left_again;
      logic signed [7:0] right, right_again;
      logic signed [AW+7:0] product;
      logic signed [PW-1:0] out;
      always_ff @(posedge clk) begin
        if (PAIRED != 0) begin
          // A negative low field borrows one from the high field.
          left <= {
            {a_high[i*8+7], a_high[i*8+:8]} - {8'd0, a_low[i*8+7]},
            {10{a_low[i*8+7]}},
            a_low[i*8+:8]
          };
        end else begin
          left <= a_low[i*8+:8];
        end
        right <= b[i*8+:8];
        left_again <= left;
        right_again <= right;
        product <= left_again * right_again;
        out <= PW'(product);
      end
      assign products[i*PW+:PW] = out;
    end
  endgenerate

  always_ff @(posedge clk) begin
    for (int j = 0; j < 8; j = j + 1) begin
      twos[j*PW+:PW] <= products[2*j*PW+:PW] + products[(2*j+1)*PW+:PW];
    end
    for (int j = 0; j < 4; j = j + 1) begin
      fours[j*PW+:PW] <= twos[2*j*PW+:PW] + twos[(2*j+1)*PW+:PW];
    end
    for (int j = 0; j < 2; j = j + 1) begin
      eights[j*PW+:PW] <= fours[2*j*PW+:PW] + fours[(2*j+1)*PW+:PW];
    end
  end

  generate
    if (PAIRED != 0) begin : g_fields
      wire signed [17:0] low0 = eights[17:0];
      wire signed [17:0] low1 = eights[PW+17-:18];
      wire signed [17:0] high0 = eights[PW-1-:18];
      wire signed [17:0] high1 = eights[2*PW-1-:18];
      always_ff @(posedge clk) begin
        low  <= 19'(low0) + 19'(low1);
        // What a negative low field borrowed comes back.
        high <= 19'(high0) + 19'(high1) + {18'd0, low0[17]} + {18'd0, low1[17]};
      end
    end else begin : g_single
      always_ff @(posedge clk) low <= eights[18:0] + eights[PW+:19];
      assign high = '0;
    end
  endgenerate
endmodule
