// SPDX-License-Identifier: Apache-2.0
// Feeds words to `parts` (hw/partial_softmax), one per clock, and writes what comes out after each.
#include <cstdint>
#include <cstdio>

#include "Vcore.h"

int main() {
    Vcore core;
    uint32_t in[12], out[64];
    core.clk = 0;
    while (std::fread(in, sizeof in, 1, stdin) == 1) {
        for (int i = 0; i < 12; ++i) {
            core.in[i] = in[i];
        }
        core.eval();
        core.clk = 1;
        core.eval();
        core.clk = 0;
        core.eval();
        for (int i = 0; i < 64; ++i) {
            out[i] = core.out[i];
        }
        std::fwrite(out, sizeof out, 1, stdout);
    }
    return 0;
}
