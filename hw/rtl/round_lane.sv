// SPDX-License-Identifier: Apache-2.0
// Key code of one channel (contract, section 3): the distance shifted right by the token exponent,
// rounded half to even for INT8 and INT4, floored for INT2. Latency 4.
module round_lane #(
    parameter int CODE_BITS = 8
) (
    input  logic                 clk,
    input  logic [         23:0] size,
    input  logic                 negative,
    input  logic [          4:0] exponent,  // at most 17 for INT8, 21 for INT4 and INT2
    input  logic                 invalid,
    output logic [CODE_BITS-1:0] code
);
  localparam int W = (CODE_BITS == 8) ? 7 : 3;  // bits that stay
  logic [W+7:0] coarse;  // with one fraction bit
  logic [W+1:0] middle;
  logic [W:0] fine;
  logic sticky1, sticky2, sticky3, negative1, negative2, negative3;
  logic invalid1, invalid2, invalid3, shift2;
  logic [2:0] shift1;
  wire [32:0] field = {8'd0, size, 1'b0};
  always_ff @(posedge clk) begin
    case (exponent[4:3])
      2'd0: coarse <= field[W+7:0];
      2'd1: coarse <= field[W+15:8];
      default: coarse <= field[W+23:16];
    endcase
    sticky1 <= (exponent[4:3] != 0 && |field[7:0]) || (exponent[4] && |field[15:8]);
    {shift1, negative1, invalid1} <= {exponent[2:0], negative, invalid};

    case (shift1[2:1])
      2'd0: middle <= coarse[W+1:0];
      2'd1: middle <= coarse[W+3:2];
      2'd2: middle <= coarse[W+5:4];
      default: middle <= coarse[W+7:6];
    endcase
    sticky2 <= sticky1 || (shift1[2:1] != 0 && |coarse[1:0]) || (shift1[2] && |coarse[3:2])
        || (&shift1[2:1] && |coarse[5:4]);
    {shift2, negative2, invalid2} <= {shift1[0], negative1, invalid1};

    fine <= shift2 ? middle[W+1:1] : middle[W:0];
    sticky3 <= sticky2 || (shift2 && middle[0]);
    {negative3, invalid3} <= {negative2, invalid2};
  end

  generate
    if (CODE_BITS == 2) begin : g_floor
      wire below = fine[1] | fine[0] | sticky3;  // of half a code
      always_ff @(posedge clk) begin
        if (invalid3) code <= 2'b00;
        else if (!negative3) code <= {1'b0, |fine[3:2]};
        else if (fine[3:2] == 0) code <= {2{below}};
        else code <= (fine[3:2] == 1 && !below) ? 2'b11 : 2'b10;
      end
    end else begin : g_even
      // The largest code does not round up: it is clamped.
      wire up = fine[0] && (sticky3 || fine[1]) && !(&fine[W:1]);
      always_ff @(posedge clk) begin
        if (invalid3) code <= '0;
        else code <= ({1'b0, fine[W:1]} ^ {CODE_BITS{negative3}}) + CODE_BITS'(negative3 ^ up);
      end
    end
  endgenerate
endmodule
