// SPDX-License-Identifier: Apache-2.0
// Distance of one FP16 key channel from its mean (contract, sections 2 and 3), as
// size and sign. For c in -14..16, which is all the contract knows. Latency 6.
module centre_lane (
    input  logic               clk,
    input  logic        [15:0] key,
    input  logic signed [ 5:0] exponent,  // c
    input  logic        [23:0] mean,      // M, two's complement
    output logic        [23:0] size,
    output logic               negative,
    output logic               nan        // four cycles earlier than size: latency 2
);
  logic [10:0] magnitude1;
  logic signed [6:0] shift1;  // m << shift, then >> 11
  logic [22:0] coarse, middle, centred4;
  logic [2:0] shift2;
  logic shift3, over2, over3, sign1, sign2, sign3, sign4, sign5, nan1;
  logic [23:0] mean1, mean2, mean3, mean4;
  logic signed [24:0] distance;

  wire special = &key[14:10];
  wire [4:0] biased = special ? 5'd30 : (key[14:10] == 0) ? 5'd1 : key[14:10];

  always_ff @(posedge clk) begin
    if (special) magnitude1 <= {11{key[9:0] == 0}};
    else magnitude1 <= {key[14:10] != 0, key[9:0]};
    shift1 <= $signed({2'b00, biased}) - 7'(exponent);
    nan1 <= special && key[9:0] != 0;
    {sign1, mean1} <= {key[15], mean};

    // Places 4..26 of m << (8, 16 or nothing): what seven more places lift to 11 or above.
    if (shift1[6]) coarse <= '0;
    else
      case (shift1[4:3])
        2'd0: coarse <= {16'd0, magnitude1[10:4]};
        2'd1: coarse <= {8'd0, magnitude1, 4'd0};
        default: coarse <= {magnitude1, 12'd0};
      endcase
    shift2 <= shift1[2:0];
    over2 <= !shift1[6] && (shift1[5] || &shift1[4:3]);
    {sign2, mean2, nan} <= {sign1, mean1, nan1};

    // Places 10..32.
    case (shift2[2:1])
      2'd0: middle <= {6'd0, coarse[22:6]};
      2'd1: middle <= {4'd0, coarse[22:4]};
      2'd2: middle <= {2'd0, coarse[22:2]};
      default: middle <= coarse;
    endcase
    shift3 <= shift2[0];
    over3 <= over2;
    {sign3, mean3} <= {sign2, mean2};

    // A zero never comes here with a shift that saturates: its shift is at most 15.
    if (over3) centred4 <= '1;
    else centred4 <= shift3 ? middle : {1'b0, middle[22:1]};
    {sign4, mean4} <= {sign3, mean3};

    // D for a positive key, -D for a negative one.
    distance <= $signed({2'b00, centred4})
        + $signed({mean4[23], mean4} ^ {25{!sign4}}) + $signed({24'd0, !sign4});
    sign5 <= sign4;

    size <= distance[24] ? 24'(-distance) : distance[23:0];
    negative <= sign5 ^ distance[24];
  end
endmodule
