// SPDX-License-Identifier: Apache-2.0
// Sums of codes by addends: one token's channels in one KV head per cycle, for all its query heads
// (contract, section 16). `first` begins a block. STYLE 0 multiplies in DSP blocks, two channels in
// each; STYLE 1 chooses among multiples of the addend in LUTs. Latency 4.
module value_sums #(
    parameter int HEADS    = 4,
    parameter int CHANNELS = 128,
    parameter int STYLE    = 0
) (
    input  logic                         clk,
    input  logic                         valid,
    input  logic                         first,
    input  logic [         HEADS*15-1:0] addends,
    input  logic [       CHANNELS*4-1:0] codes,
    output logic [HEADS*CHANNELS*25-1:0] sums
);
  logic [3:1] valids, firsts;
  always_ff @(posedge clk) begin
    valids <= {valids[2:1], valid};
    firsts <= {firsts[2:1], first};
  end
  genvar head, pair;
  generate
    for (head = 0; head < HEADS; head = head + 1) begin : g_head
      logic [14:0] addend;
      logic [16:0] three, three_again;
      logic [17:0] five, seven, five_again, seven_again;
      logic [14:0] addend1, addend2;
      assign addend = addends[head*15+:15];
      always_ff @(posedge clk) begin
        addend1 <= addend;
        addend2 <= addend1;
        three <= {2'd0, addend} + {1'd0, addend, 1'b0};
        five <= {3'd0, addend} + {1'd0, addend, 2'd0};
        seven <= {addend, 3'd0} - {3'd0, addend};
        three_again <= three;
        five_again <= five;
        seven_again <= seven;
      end
      for (pair = 0; pair < CHANNELS / 2; pair = pair + 1) begin : g_pair
        logic signed [3:0] low, high;
        logic signed [18:0] low_product, high_product;
        logic signed [24:0] low_sum, high_sum;
        assign low  = codes[(2*pair)*4+:4];
        assign high = codes[(2*pair+1)*4+:4];
        if (STYLE == 0) begin : g_dsp
          logic signed [26:0] both, both_again;
          logic signed [17:0] factor, factor_again;
          logic signed [44:0] whole;
          always_ff @(posedge clk) begin
            // A negative low product borrows one of the high field; it is given back below.
            both <= $signed({high[3], high, 22'd0}) + 27'(low);
            factor <= {3'd0, addend};
            both_again <= both;
            factor_again <= factor;
            whole <= both_again * factor_again;
          end
          assign low_product  = whole[18:0];
          assign high_product = 19'(whole >>> 22) + 19'(whole[21]);
        end else begin : g_lut
          logic signed [3:0] low1, high1, low2, high2;
          always_ff @(posedge clk) begin
            low1 <= low;
            high1 <= high;
            low2 <= low1;
            high2 <= high1;
          end
          multiple of_low (
              .clk(clk),
              .code(low2),
              .one(addend2),
              .three(three_again),
              .five(five_again),
              .seven(seven_again),
              .product(low_product)
          );
          multiple of_high (
              .clk(clk),
              .code(high2),
              .one(addend2),
              .three(three_again),
              .five(five_again),
              .seven(seven_again),
              .product(high_product)
          );
        end
        always_ff @(posedge clk) begin
          if (valids[3]) begin
            low_sum  <= (firsts[3] ? 25'sd0 : low_sum) + 25'(low_product);
            high_sum <= (firsts[3] ? 25'sd0 : high_sum) + 25'(high_product);
          end
        end
        assign sums[(head*CHANNELS+2*pair)*25+:50] = {high_sum, low_sum};
      end
    end
  endgenerate
endmodule

// A code of -7..7 times an addend, whose odd multiples are there. Latency 1.
module multiple (
    input  logic               clk,
    input  logic signed [ 3:0] code,
    input  logic        [14:0] one,
    input  logic        [16:0] three,
    input  logic        [17:0] five,
    input  logic        [17:0] seven,
    output logic signed [18:0] product
);
  logic [2:0] size;
  logic [17:0] chosen;
  assign size = code[3] ? 3'(-code) : code[2:0];
  always_comb begin
    case (size)
      3'd1: chosen = {3'd0, one};
      3'd2: chosen = {2'd0, one, 1'b0};
      3'd3: chosen = {1'd0, three};
      3'd4: chosen = {1'd0, one, 2'd0};
      3'd5: chosen = five;
      3'd6: chosen = {three, 1'b0};
      3'd7: chosen = seven;
      default: chosen = '0;
    endcase
  end
  always_ff @(posedge clk) product <= code[3] ? -$signed({1'b0, chosen}) : $signed({1'b0, chosen});
endmodule
