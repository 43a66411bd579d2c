// SPDX-License-Identifier: Apache-2.0
// Inner products of one 16-channel slice of TOKENS tokens with the query codes of G heads.
// Latency 8. Order of the sums: token, then head.
module dot_beat #(
    parameter int TOKENS = 8,
    parameter int G = 4,
    parameter int CODE_BITS = 4,
    parameter int STYLE = 1  // 0 dsp, 1 lut
) (
    input  logic                           clk,
    input  logic [TOKENS*16*CODE_BITS-1:0] codes,
    input  logic [              G*128-1:0] query,
    output logic [         TOKENS*G*19-1:0] sums
);
  localparam int TB = 16 * CODE_BITS;
  genvar t, g;
  generate
    if (STYLE == 0) begin : g_dsp
      logic [TOKENS*128-1:0] wide;
      for (t = 0; t < TOKENS * 16; t = t + 1) begin : g_wide
        if (CODE_BITS == 2) begin : g_odd
          // INT2: k stands for 2k + 1.
          assign wide[t*8+:8] = {{6{codes[t*2+1]}}, codes[t*2], 1'b1};
        end else begin : g_sign
          assign wide[t*8+:8] = 8'($signed(codes[t*CODE_BITS+:CODE_BITS]));
        end
      end
      if (TOKENS > 1) begin : g_tokens
        for (t = 0; t < TOKENS; t = t + 2) begin : g_token
          for (g = 0; g < G; g = g + 1) begin : g_head
            dot_pairs #(
                .PAIRED(1)
            ) pairs (
                .clk(clk),
                .a_low(wide[t*128+:128]),
                .a_high(wide[(t+1)*128+:128]),
                .b(query[g*128+:128]),
                .low(sums[(t*G+g)*19+:19]),
                .high(sums[((t+1)*G+g)*19+:19])
            );
          end
        end
      end else begin : g_heads
        // One token: two query heads share a multiplier instead.
        for (g = 0; g + 1 < G; g = g + 2) begin : g_pair
          dot_pairs #(
              .PAIRED(1)
          ) pairs (
              .clk(clk),
              .a_low(query[g*128+:128]),
              .a_high(query[(g+1)*128+:128]),
              .b(wide),
              .low(sums[g*19+:19]),
              .high(sums[(g+1)*19+:19])
          );
        end
        if (G % 2 == 1) begin : g_odd_head
          logic [18:0] unused;
          dot_pairs #(
              .PAIRED(0)
          ) single (
              .clk(clk),
              .a_low(query[(G-1)*128+:128]),
              .a_high(128'd0),
              .b(wide),
              .low(sums[(G-1)*19+:19]),
              .high(unused)
          );
        end
      end
    end else begin : g_lut
      logic [TOKENS*TB-1:0] codes_again;
      logic [G*128-1:0] query_again;
      logic [G*72-1:0] pair_sums;
      logic [G*13-1:0] query_sums;
      always_ff @(posedge clk) begin
        codes_again <= codes;
        query_again <= query;
        for (int i = 0; i < G * 8; i = i + 1) begin
          pair_sums[i*9+:9] <= {query[i*16+7], query[i*16+:8]}
              + {query[i*16+15], query[i*16+8+:8]};
        end
      end
      for (g = 0; g < G; g = g + 1) begin : g_query
        if (CODE_BITS == 2) begin : g_sum
          logic [39:0] twos;
          logic [21:0] fours;
          logic [11:0] eights;
          always_ff @(posedge clk) begin
            for (int i = 0; i < 4; i = i + 1) begin
              twos[i*10+:10] <= {pair_sums[g*72+i*18+8], pair_sums[g*72+i*18+:9]}
                  + {pair_sums[g*72+i*18+17], pair_sums[g*72+i*18+9+:9]};
            end
            for (int i = 0; i < 2; i = i + 1) begin
              fours[i*11+:11] <= {twos[i*20+9], twos[i*20+:10]}
                  + {twos[i*20+19], twos[i*20+10+:10]};
            end
            eights <= {fours[10], fours[10:0]} + {fours[21], fours[21:11]};
          end
          delay_line #(
              .WIDTH (13),
              .CYCLES(2)
          ) late (
              .clk(clk),
              .in ({eights[11], eights}),
              .out(query_sums[g*13+:13])
          );
        end else begin : g_none
          assign query_sums[g*13+:13] = '0;
        end
        for (t = 0; t < TOKENS; t = t + 1) begin : g_token
          dot_planes #(
              .CODE_BITS(CODE_BITS)
          ) planes (
              .clk(clk),
              .code(codes_again[t*TB+:TB]),
              .query(query_again[g*128+:128]),
              .pair_sums(pair_sums[g*72+:72]),
              .query_sum(query_sums[g*13+:13]),
              .sum(sums[(t*G+g)*19+:19])
          );
        end
      end
    end
  endgenerate
endmodule
