// SPDX-License-Identifier: Apache-2.0
// Inner product of 16 key codes with 16 query codes from bit planes: two code bits of a plane
// pick one of four sums of their two query codes. Latency 7 from code and the pair sums.
// INT2 codes k stand for 2k + 1, so 2 P + (sum of the query codes) comes out.
module dot_planes #(
    parameter int CODE_BITS = 4
) (
    input  logic                           clk,
    input  logic        [16*CODE_BITS-1:0] code,
    input  logic        [           127:0] query,
    input  logic        [            71:0] pair_sums,   // query[2j] + query[2j+1], 9 bits each
    input  logic        [            12:0] query_sum,   // of all 16, five cycles later
    output logic signed [            18:0] sum
);
  logic [12*CODE_BITS-1:0] planes;
  genvar p;
  generate
    for (p = 0; p < CODE_BITS; p = p + 1) begin : g_plane
      logic [71:0] picked;
      logic [39:0] twos;
      logic [21:0] fours;
      logic signed [11:0] plane;
      always_ff @(posedge clk) begin
        for (int j = 0; j < 8; j = j + 1) begin
          case ({code[(2*j+1)*CODE_BITS+p], code[2*j*CODE_BITS+p]})
            2'b00: picked[j*9+:9] <= 9'd0;
            2'b01: picked[j*9+:9] <= {query[16*j+7], query[16*j+:8]};
            2'b10: picked[j*9+:9] <= {query[16*j+15], query[16*j+8+:8]};
            default: picked[j*9+:9] <= pair_sums[j*9+:9];
          endcase
        end
        for (int j = 0; j < 4; j = j + 1) begin
          twos[j*10+:10] <= {picked[j*18+8], picked[j*18+:9]}
              + {picked[j*18+17], picked[j*18+9+:9]};
        end
        for (int j = 0; j < 2; j = j + 1) begin
          fours[j*11+:11] <= {twos[j*20+9], twos[j*20+:10]} + {twos[j*20+19], twos[j*20+10+:10]};
        end
        plane <= {fours[10], fours[10:0]} + {fours[21], fours[21:11]};
      end
      assign planes[p*12+:12] = plane;
    end

    // The top plane of a two's complement code counts negatively.
    if (CODE_BITS == 2) begin : g_int2
      logic signed [13:0] product;
      logic signed [18:0] whole;
      wire signed [11:0] p0 = planes[11:0];
      wire signed [11:0] p1 = planes[23:12];
      wire signed [12:0] q = query_sum;
      always_ff @(posedge clk) begin
        product <= 14'(p0) - (14'(p1) <<< 1);
        whole <= (19'(product) <<< 1) + 19'(q);
        sum <= whole;
      end
    end else if (CODE_BITS == 4) begin : g_int4
      wire signed [11:0] p0 = planes[11:0];
      wire signed [11:0] p1 = planes[23:12];
      wire signed [11:0] p2 = planes[35:24];
      wire signed [11:0] p3 = planes[47:36];
      logic signed [13:0] low, high;
      logic signed [18:0] whole;
      always_ff @(posedge clk) begin
        low <= 14'(p0) + (14'(p1) <<< 1);
        high <= 14'(p2) - (14'(p3) <<< 1);
        whole <= 19'(low) + (19'(high) <<< 2);
        sum <= whole;
      end
    end else begin : g_int8
      logic signed [13:0] pair[0:3];
      logic signed [15:0] low, high;
      always_ff @(posedge clk) begin
        for (int j = 0; j < 3; j = j + 1) begin
          pair[j] <= 14'($signed(planes[j*24+:12])) + (14'($signed(planes[j*24+12+:12])) <<< 1);
        end
        pair[3] <= 14'($signed(planes[72+:12])) - (14'($signed(planes[84+:12])) <<< 1);
        low <= 16'(pair[0]) + (16'(pair[1]) <<< 2);
        high <= 16'(pair[2]) + (16'(pair[3]) <<< 2);
        sum <= 19'(low) + (19'(high) <<< 4);
      end
    end
  endgenerate
endmodule
