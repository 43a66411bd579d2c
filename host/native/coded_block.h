// SPDX-License-Identifier: Apache-2.0
// At most 64 coded tokens of a segment, as attention takes them.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_ahead.h"

namespace {

struct CodedBlock {
    CodedBlock(const CodedAttention& call, const CodedTokens& of, int64_t first, HeadRange range)
        : segment(of), start(first),
          tokens(int(of.tokens - first < kBlockTokens ? of.tokens - first : kBlockTokens)),
          used((tokens + 7) / 8 * 8), rows(of.code_rows + first), first_head(range.first) {
        if (tokens < used) {
            for (int i = 0; i < used; ++i) {
                some_rows[i] = rows[i < tokens ? i : tokens - 1];
            }
            rows = some_rows;
        }
        const uint64_t* const beside = of.exponents + first;
        if (tokens == kBlockTokens && lie_in_order(beside)) {
            take_runs(at(beside[0]), range);
        } else if (lie_behind(call, of) && range.count <= 8) {
            take_words(beside, range);
        } else {
            take_bytes(beside, range);
        }
    }

    CodedBlock(const CodedBlock&) = delete;

    const uint8_t* exponents_of(int head) const { return exponents[head - first_head]; }

    // Whether a token is invalid in a KV head.
    bool has_invalid(int head) const {
        const uint8_t* __restrict const own = exponents_of(head);
        uint8_t invalid = 0;
        for (int i = 0; i < kBlockTokens; ++i) {
            invalid |= own[i] == hillinfer::kInvalidExponent;
        }
        return invalid || (segment.invalid_keys &&
                           any_of(segment.invalid_keys + size_t(head) * segment.stride + start, tokens));
    }

    const CodedTokens& segment;
    const int64_t start;
    const int tokens;
    // Whole octets of tokens are taken; behind the last one codes are taken 0 times.
    const int used;
    const uint64_t* rows;

private:
    static bool lie_in_order(const uint64_t* __restrict beside) {
        uint64_t other = 0;
        for (int i = 0; i < kBlockTokens; ++i) {
            other |= beside[i] - uint64_t(i) - beside[0];
        }
        return !other;
    }

    // All of a head beside each other, as in a shadow.
    void take_runs(const uint8_t* from, HeadRange range) {
        for (int head = 0; head < range.count; ++head) {
            std::memcpy(exponents[head],
                        from + size_t(range.first + head) * segment.exponent_stride, kBlockTokens);
        }
    }

    // Each token's beside each other, behind its codes. Words end with the last head's, so that nothing
    // behind it is read.
    void take_words(const uint64_t* beside, HeadRange range) {
        alignas(64) uint64_t words[kBlockTokens] = {};
        for (int i = 0; i < tokens; ++i) {
            std::memcpy(words + i, at(beside[i]) + range.first + range.count - 8, 8);
        }
        for (int head = 0; head < range.count; ++head) {
            uint8_t* __restrict const to = exponents[head];
            const int shift = 8 * (8 - range.count + head);
            for (int i = 0; i < kBlockTokens; ++i) {
                to[i] = uint8_t(words[i] >> shift);
            }
        }
    }

    void take_bytes(const uint64_t* beside, HeadRange range) {
        for (int head = 0; head < range.count; ++head) {
            const size_t own = size_t(range.first + head) * segment.exponent_stride;
            uint8_t* __restrict const to = exponents[head];
            // 0 behind the last one.
            std::memset(to, 0, kBlockTokens);
#pragma GCC unroll 8
            for (int i = 0; i < tokens; ++i) {
                to[i] = at(beside[i])[own];
            }
        }
    }

    static bool any_of(const uint8_t* bytes, int count) {
        uint64_t any = 0, word;
        int i = 0;
        for (; i + 8 <= count; i += 8) {
            std::memcpy(&word, bytes + i, sizeof word);
            any |= word;
        }
        for (; i < count; ++i) {
            any |= bytes[i];
        }
        return any;
    }

    const int first_head;
    uint64_t some_rows[kBlockTokens];
    alignas(64) uint8_t exponents[hillinfer::kMostBlockHeads][kBlockTokens];
};

}  // namespace
