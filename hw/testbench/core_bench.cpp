// SPDX-License-Identifier: Apache-2.0
// Drives score_core or shadow_core (-DSHADOW) through its ports: streams from a file in, with
// random stalls on every stream, what comes out to a file. Little-endian, beats of 64 bytes.
//
// In:  u32 scope, seed, stall percent of load, seg, key, out; u32 counts of load, seg, key, out
//      beats; u32 cycle limit; load beats; (u32 tokens, u32 position) per segment; key beats.
// Out: u32 beats, cycle of the first and of the last key beat, violations of "a waiting beat does
//      not change"; then per beat 64 bytes, u32 head or beat offset, u32 last.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "Vcore.h"
#include "verilated.h"

static std::vector<uint32_t> read_words(FILE *file, size_t count) {
    std::vector<uint32_t> words(count);
    if (count && fread(words.data(), 4, count, file) != count) std::exit(2);
    return words;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    FILE *file = fopen(argv[1], "rb");
    if (!file) return 2;
    auto head = read_words(file, 11);
    const uint32_t scope = head[0], loads = head[6], segs = head[7], keys = head[8],
                   outs = head[9], limit = head[10];
    auto load = read_words(file, size_t(loads) * 16);
    auto seg = read_words(file, size_t(segs) * 2);
    auto key = read_words(file, size_t(keys) * 16);
    fclose(file);

    uint64_t state = head[1] * 2654435761u + 88172645463325252ull;
    auto stall = [&](uint32_t percent) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (state >> 20) % 100 < percent;
    };

    VerilatedContext context;
    Vcore core(&context);
    auto tick = [&] {
        core.clk = 0;
        core.eval();
        core.clk = 1;
        core.eval();
    };
    core.rst = 1;
    core.load_valid = core.seg_valid = core.key_valid = core.out_ready = 0;
#ifndef SHADOW
    core.scope = scope;
#endif
    for (int i = 0; i < 4; ++i) tick();
    core.rst = 0;

    std::vector<uint32_t> out;
    uint32_t l = 0, s = 0, k = 0, got = 0, first = 0, last = 0, violations = 0;
    bool waiting = false;
    uint32_t waited[16] = {};
    // A few cycles more than needed, so that a beat too many shows.
    uint32_t after = 0;
    for (uint32_t cycle = 0; cycle < limit && after < 200; ++cycle) {
        if (got == outs && k == keys) ++after;
        // A valid that was not taken stays.
        if (!core.load_valid) core.load_valid = l < loads && !stall(head[2]);
        if (!core.seg_valid) core.seg_valid = s < segs && !stall(head[3]);
        if (!core.key_valid) core.key_valid = k < keys && !stall(head[4]);
        core.out_ready = !stall(head[5]);
        if (l < loads) std::memcpy(&core.load_data, &load[l * 16], 64);
        if (k < keys) std::memcpy(&core.key_data, &key[k * 16], 64);
        if (s < segs) {
            core.seg_tokens = seg[2 * s];
#ifndef SHADOW
            core.seg_position = seg[2 * s + 1];
#endif
        }
        core.clk = 0;
        core.eval();
        const bool load_taken = core.load_valid && core.load_ready;
        const bool seg_taken = core.seg_valid && core.seg_ready;
        const bool key_taken = core.key_valid && core.key_ready;
        if (waiting && (!core.out_valid || std::memcmp(waited, &core.out_data, 64))) ++violations;
        waiting = core.out_valid && !core.out_ready;
        std::memcpy(waited, &core.out_data, 64);
        if (core.out_valid && core.out_ready) {
            ++got;
            out.insert(out.end(), waited, waited + 16);
#ifdef SHADOW
            out.push_back(core.out_beat);
#else
            out.push_back(core.out_head);
#endif
            out.push_back(core.out_last);
        }
        if (key_taken) {
            if (k == 0) first = cycle;
            last = cycle;
            ++k;
        }
        l += load_taken;
        s += seg_taken;
        core.clk = 1;
        core.eval();
        if (load_taken) core.load_valid = 0;
        if (seg_taken) core.seg_valid = 0;
        if (key_taken) core.key_valid = 0;
    }
    core.final();
    file = fopen(argv[2], "wb");
    if (!file) return 2;
    const uint32_t found[] = {got, first, last, violations};
    fwrite(found, 4, 4, file);
    fwrite(out.data(), 4, out.size(), file);
    fclose(file);
    return 0;
}
