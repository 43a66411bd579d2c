// SPDX-License-Identifier: Apache-2.0
// w = 2^(Z / 256) with 24 fraction bits by Mitchell's approximation (contract, section 7).
// Latency 4. `live` low (in the last cycle) gives 0.
module weight_unit (
    input  logic               clk,
    input  logic signed [32:0] log_weight,
    input  logic               live,        // three cycles later
    output logic        [47:0] weight
);
  logic signed [24:0] integer_part;
  logic [5:0] shift1;
  logic [3:0] shift2;
  logic [1:0] shift3;
  logic [8:0] mantissa;
  logic [11:0] fine;
  logic [23:0] middle;
  logic over1, over2, over3, under1, under2, under3;
  logic [55:0] field;

  assign integer_part = log_weight[32:8];

  always_ff @(posedge clk) begin
    over1 <= !integer_part[24] && (|integer_part[23:5] || integer_part[4:3] == 2'b11);
    // Below -24 nothing is left of nine bits; -24 ends in 101000.
    under1 <= integer_part[24] && !(&integer_part[23:6] && integer_part[5:3] >= 3'd5);
    shift1 <= integer_part[5:0] + 6'd24;
    mantissa <= {1'b1, log_weight[7:0]};

    fine <= {3'd0, mantissa} << shift1[1:0];
    shift2 <= shift1[5:2];
    over2 <= over1;
    under2 <= under1;

    middle <= {12'd0, fine} << {shift2[1:0], 2'b00};
    shift3 <= shift2[3:2];
    over3 <= over2;
    under3 <= under2;

    if (!live || under3) weight <= '0;
    else if (over3) weight <= '1;
    else weight <= field[55:8];
  end
  always_comb begin
    case (shift3)
      2'd0: field = {32'd0, middle};
      2'd1: field = {16'd0, middle, 16'd0};
      default: field = {middle, 32'd0};
    endcase
  end
endmodule
