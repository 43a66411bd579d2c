// SPDX-License-Identifier: Apache-2.0
// The score code is the contract's definition (section 7), for every sum and both rules:
// mag(v) = v below 1024, else ((bl - 10) << 10) | ((v >> (bl - 11)) & 1023) with bl the bit length.
module prove_score_code #(
    parameter int RULE = 1,
    parameter int WIDTH = 57
) (
    input logic clk,
    input logic [WIDTH-1:0] value,
    input logic invalid
);
  logic [15:0] code, defined, expected;
  logic [3:0] step = 0;
  score_code #(.RULE(RULE), .WIDTH(WIDTH)) dut (.*);

  logic [63:0] size, magnitude;
  logic [6:0] length;
  logic is_negative;
  localparam logic [63:0] LIMIT = 64'hFFFF_FFFF_FFFF;
  wire [63:0] unsigned_value = value;
  wire signed [63:0] signed_value = $signed(value);
  always_comb begin
    is_negative = RULE == 0 && value[WIDTH-1];
    // weight_sum: S = min(sum, 2^48 - 1). raw_sum: V or, where V < 0, -V - 1.
    if (RULE != 0) size = (unsigned_value > LIMIT) ? LIMIT : unsigned_value;
    else size = is_negative ? -signed_value - 64'd1 : signed_value;
    length = 7'd0;
    for (int i = 0; i < 64; i = i + 1) if (size[i]) length = i + 1;
    if (size < 1024) magnitude = size;
    else magnitude = ({57'd0, length - 7'd10} << 10) | ((size >> (length - 7'd11)) & 64'd1023);
    if (invalid) defined = 16'd0;
    else if (RULE != 0) defined = 16'd1 + magnitude[15:0];
    else defined = is_negative ? 16'd32767 - magnitude[15:0] : 16'd32768 + magnitude[15:0];
  end

  always_ff @(posedge clk) begin
    if (step == 0) expected <= defined;
    step <= step + 1'b1;
    if (step == 5) assert (code == expected);
  end
endmodule
