// SPDX-License-Identifier: Apache-2.0
// Software prefetch for attention over coded tokens: cache lines of the block after the current one.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_rows.h"

namespace {

using hillinfer::CodedAttention;
using hillinfer::CodedTokens;
using hillinfer::HeadRange;

// A block of a segment, and the one after it.
struct BlockAt {
    const CodedTokens* segment;
    int64_t first;

    bool follow(const CodedTokens* stop) {
        first += kBlockTokens;
        while (segment != stop && first >= segment->tokens) {
            ++segment;
            first = 0;
        }
        return segment != stop;
    }

    int64_t tokens() const {
        const int64_t left = segment->tokens - first;
        return left < kBlockTokens ? left : kBlockTokens;
    }
};

// Whether exponents lie behind their tokens' codes, head by head.
inline bool lie_behind(const CodedAttention& call, const CodedTokens& of) {
    return of.exponents[0] - of.code_rows[0] == uint64_t(call.kv_heads) * call.code_bytes() &&
           of.exponent_stride == 1;
}

// Of tokens whose exponents lie apart from their codes.
inline void fetch_exponents(const CodedTokens& of, HeadRange range, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        // Exponents of one head lie in one line, or those of all heads.
        const uint64_t beside = of.exponents[i];
        if (i == begin || (beside ^ of.exponents[i - 1]) >= 64) {
            for (int one = range.first; one < range.first + range.count; ++one) {
                __builtin_prefetch(at(beside) + one * of.exponent_stride, 0, 2);
            }
        }
    }
}

// Lines of some of a segment's tokens. Exponents that do not lie behind the codes are asked for at once.
inline Ahead lines_of(const CodedAttention& call, HeadRange range, const CodedTokens& of,
                      int64_t begin, int64_t end) {
    const size_t start = size_t(range.first) * call.code_bytes();
    size_t last = size_t(range.count) * call.code_bytes() - 1;
    if (lie_behind(call, of)) {
        last = size_t(call.kv_heads) * call.code_bytes() + size_t(range.first + range.count - 1) - start;
    } else {
        fetch_exponents(of, range, begin, end);
    }
    return Ahead(of.code_rows + begin, end - begin, start, last);
}

// Asks for the first block, while rows are attended to.
inline void fetch_first(const CodedAttention& call, HeadRange range, const CodedTokens* segments,
                        int64_t count) {
    if (count && segments->tokens) {
        Ahead first = lines_of(call, range, *segments, 0, BlockAt{segments, 0}.tokens());
        while (first.touch()) {
        }
    }
}

// A part of the block after this one, as much of it as `number` is of the range. What this KV head needs
// of its tokens is asked for at once.
inline Ahead next_lines(const CodedAttention& call, HeadRange range, const CodedTokens* segment,
                        const CodedTokens* stop, int64_t first, int number) {
    BlockAt next{segment, first};
    if (!next.follow(stop)) {
        return {};
    }
    const CodedTokens& own = *next.segment;
    const int64_t tokens = next.tokens();
    const int head = range.first + number;
    if (own.invalid_keys) {
        const uint8_t* const keys = own.invalid_keys + size_t(head) * own.stride + next.first;
        __builtin_prefetch(keys, 0, 3);
        __builtin_prefetch(keys + tokens - 1, 0, 3);
    }
    if (next.segment != segment) {
        // Within a segment the block before asks for them.
        for (int h = head * call.group_size; h < (head + 1) * call.group_size; ++h) {
            fetch_bytes(reinterpret_cast<const uint8_t*>(own.aligned + h * own.stride), tokens * 4);
        }
    }
    const int64_t begin = next.first + tokens * number / range.count;
    const int64_t end = next.first + tokens * (number + 1) / range.count;
    Ahead lines = lines_of(call, range, own, begin, end);
    // Addresses of the block after that: they are looked at when it is the next one.
    BlockAt later = next;
    if (number == 0 && later.follow(stop)) {
        fetch_bytes(reinterpret_cast<const uint8_t*>(later.segment->code_rows + later.first),
                    later.tokens() * 8);
        fetch_bytes(reinterpret_cast<const uint8_t*>(later.segment->exponents + later.first),
                    later.tokens() * 8);
    }
    return lines;
}

}  // namespace
