// SPDX-License-Identifier: Apache-2.0
// L' of single tokens of a sequence.
#include <algorithm>
#include <cstring>
#include <vector>

#include "group_work.h"
#include "sequence.h"

namespace hillinfer {
namespace {

// From what is worked on to what comes to the first cache, and to what comes to the second, in bytes of
// what is read, made up to whole tiles (tile_heads.h says why in two steps).
constexpr size_t kNearBytes = 2048;
constexpr size_t kFarBytes = 24576;

// Some tokens of a group.
struct SomeTokens {
    int64_t group;    // In the sequence.
    uint64_t tokens;  // A bit for each.
    int64_t first;    // How many tokens come before them.
};

// Marks which of some tokens are invalid; the marks are 0.
void mark_invalid(const uint8_t* exponents, uint64_t tokens, uint8_t* marks) {
    int any = 0;
    for (int i = 0; i < kGroupTokens; ++i) {
        any |= exponents[i] == kInvalidExponent;
    }
    for (; any && tokens; tokens &= tokens - 1) {
        *marks++ = exponents[__builtin_ctzll(tokens)] == kInvalidExponent;
    }
}

// Groups of ascending positions.
std::vector<SomeTokens> groups_of(const int64_t* positions, int64_t count) {
    std::vector<SomeTokens> groups;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t group = positions[i] / kGroupTokens;
        if (groups.empty() || groups.back().group != group) {
            groups.push_back({group, 0, i});
        }
        groups.back().tokens |= uint64_t(1) << (positions[i] % kGroupTokens);
    }
    return groups;
}

}  // namespace

// L' of single tokens: groups that have none of them are not looked at.
void aligned_tokens(const Kernels& kernels, const Sequence& sequence, const int64_t* positions,
                    int64_t count, int32_t* aligned, uint8_t* invalid, int32_t* products) {
    const Shape& shape = sequence.shape;
    Queries queries(kernels, shape, sequence.segment_count);
    std::vector<Scratch> own = scratches(shape, sequence.threads);
    for (Scratch& one : own) {
        std::fill_n(one.products.get(), size_t(shape.rows()) * kGroupTokens, 0);
    }
    const std::vector<SomeTokens> groups = groups_of(positions, count);
    const int64_t per_segment = shape.segment_tokens / kGroupTokens;
    const auto group_at = [&](int64_t group) {
        return sequence.segments[group / per_segment].shadow +
               size_t(group % per_segment) * shape.group_bytes();
    };
    // Tiles that are read, and where each group's begin.
    const int tile_tokens = shape.tile_tokens();
    std::vector<const uint8_t*> reads;
    std::vector<size_t> first_read;
    int64_t coded = -1;
    for (const SomeTokens& group : groups) {
        const int64_t number = group.group / per_segment;
        if (number != coded) {
            queries.code(sequence.scaled, sequence.segments[number], number, own[0].codes.get());
            coded = number;
        }
        first_read.push_back(reads.size());
        const uint8_t* read = group_at(group.group) + size_t(shape.kv_heads) * kBeatBytes;
        for (uint64_t left = group.tokens; left; left >>= tile_tokens, read += shape.tile_bytes()) {
            if (left << (kGroupTokens - tile_tokens)) {
                reads.push_back(read);
            }
        }
    }
    const size_t near = kNearBytes / shape.tile_bytes() + 1;
    const size_t far = kFarBytes / shape.tile_bytes() + 1;
    // Behind the last one, it again.
    reads.insert(reads.end(), far, reads.empty() ? nullptr : reads.back());
    const int64_t all = int64_t(groups.size());
    const int threads = scoring_threads(kernels, shape, all * kGroupTokens, sequence.threads);
    const int64_t step = groups_at_once(all, threads);
    std::memset(invalid, 0, size_t(shape.kv_heads) * size_t(count));
    run_parallel(threads, (all + step - 1) / step, [&](int64_t item, int worker) {
        const int64_t stop = std::min(all, (item + 1) * step);
        for (int64_t i = item * step; i < stop; ++i) {
            const SomeTokens& group = groups[size_t(i)];
            const int64_t number = group.group / per_segment;
            const uint8_t* const from = group_at(group.group);
            const QueryCodes query = queries.codes_of(number);
            GroupInput in{from, &query, queries.arranged_of(number), own[worker].products.get(),
                          own[worker].row_words.get()};
            TilesToCome coming{reads.data() + first_read[size_t(i)], near, far};
            if (products) {
                in.products = products + group.group * shape.rows() * kGroupTokens;
                coming.tiles = nullptr;
            }
            kernels.some_log_weights(shape, in, group.tokens, coming, aligned + group.first, count);
            for (int head = 0; head < shape.kv_heads; ++head) {
                mark_invalid(from + head * kGroupTokens, group.tokens,
                             invalid + head * count + group.first);
            }
        }
    });
}

}  // namespace hillinfer
