// SPDX-License-Identifier: Apache-2.0
// Every operand of pair_product, all 2^24: both products come from one multiplier. Prints the
// number of wrong ones.
#include <cstdint>
#include <cstdio>

#include "Vcore.h"
#include "verilated.h"

int main() {
    VerilatedContext context;
    Vcore unit(&context);
    const uint32_t count = 1u << 24, latency = 4;
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < count + latency; ++i) {
        unit.low = i & 255;
        unit.high = (i >> 8) & 255;
        unit.b = (i >> 16) & 255;
        unit.clk = 0;
        unit.eval();
        unit.clk = 1;
        unit.eval();
        if (i + 1 < latency) continue;
        const uint32_t past = i + 1 - latency;
        if (past >= count) break;
        const int64_t low = int8_t(past), high = int8_t(past >> 8), b = int8_t(past >> 16);
        const uint64_t expected = uint64_t(low * b + high * b * (1 << 18)) & ((1ull << 36) - 1);
        wrong += expected != unit.product;
    }
    unit.final();
    printf("%u\n", wrong);
    return 0;
}
