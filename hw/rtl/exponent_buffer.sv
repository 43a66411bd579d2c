// SPDX-License-Identifier: Apache-2.0
// Token exponents of the last eight groups, a beat per KV head; reads those of a tile CYCLES
// after its address was given (by then up to seven more groups may have come).
module exponent_buffer #(
    parameter int KV = 8,
    parameter int TILE_TOKENS = 8,
    parameter int CYCLES = 11,
    parameter int HEAD_BITS = (KV > 1) ? $clog2(KV) : 1
) (
    input  logic                     clk,
    input  logic                     write_enable,
    input  logic [            511:0] write_data,
    input  logic [              2:0] bank,
    input  logic [    HEAD_BITS-1:0] head,
    input  logic [              5:0] tile_token,
    output logic [TILE_TOKENS*8-1:0] tile_exponents
);
  localparam int TILE_BITS = $clog2(64 / TILE_TOKENS);
  logic [HEAD_BITS+2:0] read_address;
  logic [TILE_BITS-1:0] tile;
  logic [511:0] beat;
  delay_line #(
      .WIDTH (HEAD_BITS + 3),
      .CYCLES(CYCLES - 3)
  ) address_line (
      .clk(clk),
      .in ({bank, head}),
      .out(read_address)
  );
  delay_line #(
      .WIDTH (TILE_BITS),
      .CYCLES(CYCLES - 1)
  ) tile_line (
      .clk(clk),
      .in (tile_token[5-:TILE_BITS]),
      .out(tile)
  );
  ram_block #(
      .WIDTH(512),
      .DEPTH(8 << HEAD_BITS)
  ) memory (
      .clk(clk),
      .write_enable(write_enable),
      .write_address({bank, head}),
      .write_data(write_data),
      .read_enable(1'b1),
      .read_address(read_address),
      .read_data(beat)
  );
  always_ff @(posedge clk) tile_exponents <= beat[tile*TILE_TOKENS*8+:TILE_TOKENS*8];
endmodule
