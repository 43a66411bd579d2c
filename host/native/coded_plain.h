// SPDX-License-Identifier: Apache-2.0
// Kernels of attention over rows and coded tokens in plain C++, for any instruction set.
#pragma once
#include "coded_kernels.h"

namespace {

struct PlainCodes : PlainRows<PlainCodes> {
    static constexpr int kChunkHeads = 4;
    static constexpr bool kAddsSums = false;

    // Codes of a block's tokens, channel by channel.
    struct Arranged {
        alignas(64) int16_t codes[kBlockTokens][kMostCodedChannels];
    };

    struct Addends {
        alignas(64) uint16_t of[kChunkHeads][kBlockTokens];
    };

    static void weigh_units(const CodedUnit* units, int count, int tokens, Addends* addends,
                            CodedWeights (*out)[kChunkHeads]) {
        plain_weigh_units<PlainCodes>(units, count, tokens, addends, out);
    }

    // Sums have channels in their order.
    static int width(int blocks) { return blocks * 32; }
    static int place(int channel, int) { return channel; }

    static void arrange(const uint64_t* rows, size_t start, int blocks, int tokens, Arranged& out) {
        for (int token = 0; token < tokens; ++token) {
            for (int block = 0; block < blocks; ++block) {
                const uint8_t* __restrict from = at(rows[token]) + start + block * 16;
                int16_t* __restrict to = out.codes[token] + block * 32;
                for (int i = 0; i < 16; ++i) {
                    to[i] = int16_t(int8_t(uint8_t(from[i] << 4)) >> 4);
                    to[16 + i] = int16_t(int8_t(from[i]) >> 4);
                }
            }
        }
    }

    // Sums of codes by a head's addends, channel by channel.
    static void sums(const Arranged& arranged, int blocks, int tokens,
                     const Addends& addends, int heads, Ahead& ahead,
                     int32_t (*out)[kMostCodedChannels]) {
        for (int head = 0; head < heads; ++head) {
            for (int first = 0; first < blocks * 32; first += 32) {
                int32_t sums[32] = {};
                for (int token = 0; token < tokens; ++token) {
                    ahead.touch();
                    const int32_t addend = addends.of[head][token];
                    const int16_t* __restrict codes = arranged.codes[token] + first;
                    for (int i = 0; i < 32; ++i) {
                        sums[i] += addend * codes[i];
                    }
                }
                std::memcpy(out[head] + first, sums, sizeof sums);
            }
        }
    }

    template <bool kBetween>
    static void powers(const int32_t* relative, int32_t* mantissa) {
        plain_powers<kBetween>(relative, mantissa);
    }

    static void widen(int32_t stored_type, const uint8_t* from, int count, float* out) {
        plain_widen(stored_type, from, count, out);
    }
};

}  // namespace
