// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens, for one instruction set (scoring contract, section 16).
//
// `V` has kChunkHeads (query heads whose sums are taken together), `arrange` and `sums` (codes of a
// block, and sums of them by addends), `powers`, and `products` and `weighted` as `PlainRows` has them.
// Whatever it has, the bits are the same: sums of codes are integers, and floats are added in the
// contract's order.
#pragma once
#include "coded_ahead.h"
#include "coded_plain_rows.h"
#include "coded_weights.h"

namespace {

using hillinfer::BlockPartials;
using hillinfer::CodedWork;
using hillinfer::kMostBlockHeads;
using hillinfer::kMostCodedChannels;

constexpr float kExactLimit = 32767.0f;

template <class V>
struct CodedHeads {
    // --- Blocks of rows ---

    // X of rows in one KV head, out[query head * count + row]; whether one is no number.
    static void fix_products(const CodedAttention& call, int head, const uint64_t* rows,
                             int64_t count, int32_t* out, uint8_t* broken) {
        const int dim = call.head_dim;
        const size_t start = size_t(head) * dim * 2;
        alignas(64) float query[V::kChunkHeads][kMostCodedChannels];
        alignas(64) float products[V::kChunkHeads][kBlockTokens];
        for (int first = 0; first < call.group_size; first += V::kChunkHeads) {
            const int heads = chunk(call, first);
            for (int h = 0; h < heads; ++h) {
                const float* own = call.query + size_t(head * call.group_size + first + h) * dim;
                std::memset(query[h], 0, sizeof query[h]);
                std::memcpy(query[h], own, size_t(dim) * sizeof *own);
                broken[first + h] = 0;
            }
            for (int64_t row = 0; row < count; row += kBlockTokens) {
                const int tokens = int(count - row < kBlockTokens ? count - row : kBlockTokens);
                V::products(call.stored_type, rows + row, tokens, start, dim, query, heads, products);
                for (int h = 0; h < heads; ++h) {
                    broken[first + h] |=
                        fix_block(products[h], tokens, out + (first + h) * count + row);
                }
            }
        }
    }

    // Softmax over one block of at most 64 rows; hand(query head of the group, R, W, outputs).
    // Where `largest` is given, heads are left out whose block is too far below it.
    template <class Hand>
    static void exact_block(const CodedAttention& call, int head, const uint64_t* rows, int tokens,
                            const int32_t* fixed, int64_t stride, const int32_t* largest, Hand hand) {
        const int dim = call.head_dim;
        const size_t start = (size_t(call.kv_heads) + size_t(head)) * dim * 2;
        alignas(64) float outputs[V::kChunkHeads][kMostCodedChannels];
        alignas(64) float weights[V::kChunkHeads][kBlockTokens];
        for (int first = 0; first < call.group_size; first += V::kChunkHeads) {
            const int heads = chunk(call, first);
            BlockWeights own[V::kChunkHeads];
            for (int h = 0; h < heads; ++h) {
                alignas(64) int32_t block[kBlockTokens];
                take(fixed + (first + h) * stride, tokens, block, [](int32_t x) { return x; });
                weigh<V, true>(block, tokens, own[h]);
                for (int i = 0; i < kBlockTokens; ++i) {
                    const int32_t power = own[h].power[i] < kLeastPower ? kLeastPower : own[h].power[i];
                    const float weight = float(own[h].mantissa[i]) *
                                         float_of_bits((power - 23 + 127) << 23);
                    weights[h][i] = own[h].power[i] < kLeastPower ? 0.0f : weight;
                }
            }
            V::weighted(call.stored_type, rows, tokens, start, dim, weights, heads, outputs);
            for (int h = 0; h < heads; ++h) {
                if (!largest || largest[first + h] - own[h].reference <= -kLeastPower) {
                    hand(first + h, own[h].reference, own[h].total, outputs[h]);
                }
            }
        }
    }

    // --- Blocks of coded tokens ---

    // Where sums of codes have each channel, and which one each place has.
    struct Places {
        int width;
        int32_t of[kMostCodedChannels];
        int32_t channels[kMostCodedChannels] = {};

        explicit Places(const CodedAttention& call) : width(V::width(call.code_bytes() / 16)) {
            for (int i = 0; i < call.head_dim; ++i) {
                of[i] = V::place(i, call.code_bytes() / 16);
                channels[of[i]] = i;
            }
        }

        int operator[](int channel) const { return of[channel]; }
    };

    // M and 2^(c-14) of a segment's channels at their places, for `coded_block`.
    static void prepare(const CodedAttention& call, const Places& places, HeadRange range,
                        const CodedTokens& segment, const CodedWork& work) {
        alignas(64) float unit[kMostCodedChannels];
        for (int head = range.first; head < range.first + range.count; ++head) {
            float* __restrict const means = work.means + size_t(head) * kMostCodedChannels;
            float* __restrict const units = work.units + size_t(head) * kMostCodedChannels;
            const int32_t* const own = segment.means + size_t(head) * call.head_dim;
            const int8_t* const exponents = segment.channel_exponents + size_t(head) * call.head_dim;
            for (int i = 0; i < call.head_dim; ++i) {
                unit[i] = power_of_two(exponents[i] - 14);
            }
            // What lies at places of no channel nobody looks at.
            for (int i = 0; i < places.width; ++i) {
                means[i] = float(own[places.channels[i]]);
                units[i] = unit[places.channels[i]];
            }
        }
    }

    // At most 64 coded tokens of a segment.
    struct CodedBlock {
        CodedBlock(const CodedTokens& of, int64_t first, HeadRange range)
            : segment(of), start(first),
              tokens(int(of.tokens - first < kBlockTokens ? of.tokens - first : kBlockTokens)),
              used((tokens + 7) / 8 * 8), rows(of.code_rows + first), first_head(range.first) {
            const uint64_t* beside = of.exponents + first;
            uint64_t some_beside[kBlockTokens];
            if (tokens < used) {
                for (int i = 0; i < used; ++i) {
                    some_rows[i] = rows[i < tokens ? i : tokens - 1];
                    some_beside[i] = beside[i < tokens ? i : tokens - 1];
                }
                rows = some_rows;
                beside = some_beside;
            }
            for (int head = 0; head < range.count; ++head) {
                const size_t own = size_t(range.first + head) * of.exponent_stride;
                uint8_t* __restrict const to = exponents[head];
                // 0 behind the last one.
                std::memset(to, 0, kBlockTokens);
#pragma GCC unroll 8
                for (int i = 0; i < used; ++i) {
                    to[i] = at(beside[i])[own];
                }
            }
        }

        const uint8_t* exponents_of(int head) const { return exponents[head - first_head]; }

        // Whether a token is invalid in a KV head.
        bool has_invalid(int head) const {
            const uint8_t* __restrict const own = exponents_of(head);
            uint8_t invalid = 0;
            for (int i = 0; i < kBlockTokens; ++i) {
                invalid |= own[i] == hillinfer::kInvalidExponent;
            }
            return invalid || (segment.invalid_keys &&
                               any_of(segment.invalid_keys + size_t(head) * segment.stride + start,
                                      tokens));
        }

        CodedBlock(const CodedBlock&) = delete;

        const CodedTokens& segment;
        const int64_t start;
        const int tokens;
        // Whole octets of tokens are taken; behind the last one codes are taken 0 times.
        const int used;
        const uint64_t* rows;
        const int first_head;
        uint64_t some_rows[kBlockTokens];
        alignas(64) uint8_t exponents[kMostBlockHeads][kBlockTokens];
    };

    // Softmax over a block in one of its KV heads:
    // hand(query head of the group, R, W, outputs), where outputs(i) is O of the channel whose place
    // is i. `broken` gets 1 where a token is invalid; `largest` is as in `exact_block`.
    template <class Hand>
    static void coded_block(const CodedAttention& call, int head, const CodedBlock& block,
                            const CodedWork& work, const int32_t* largest, uint8_t* broken,
                            Ahead& ahead, Hand hand) {
        const CodedTokens& segment = block.segment;
        const int blocks = call.code_bytes() / 16;
        if (block.has_invalid(head)) {
            std::memset(broken, 1, size_t(call.group_size));
        }
        const float* const means = work.means + size_t(head) * kMostCodedChannels;
        const float* const units = work.units + size_t(head) * kMostCodedChannels;
        typename V::Arranged arranged;
        bool is_arranged = false;
        for (int first = 0; first < call.group_size; first += V::kChunkHeads) {
            const int heads = chunk(call, first);
            CodedWeights weights[V::kChunkHeads];
            bool near[V::kChunkHeads];
            bool any = false;
            typename V::Addends addends;
            alignas(64) int32_t sums[V::kChunkHeads][kMostCodedChannels];
            const int64_t row = int64_t(head) * call.group_size + first;
            V::weigh_coded(segment.aligned + row * segment.stride + block.start, segment.stride,
                           heads, block.tokens, block.exponents_of(head), addends, weights);
            for (int h = 0; h < heads; ++h) {
                near[h] = !largest || largest[first + h] - weights[h].reference <= -kLeastPower;
                any |= near[h];
            }
            if (!any) {
                continue;
            }
            if (!is_arranged) {
                V::arrange(block.rows, size_t(head) * call.code_bytes(), blocks, block.used, arranged);
                is_arranged = true;
            }
            V::sums(arranged, blocks, block.used, addends, heads, ahead, sums);
            for (int h = 0; h < heads; ++h) {
                if (!near[h]) {
                    continue;
                }
                // 2^(U - 15) may be beyond a float where an exponent is one of no key: then every sum
                // but 0 is, and two factors overflow as one would.
                const int power = weights[h].top - 15;
                const float total = unit_total(weights[h].total);
                const int32_t* const own = sums[h];
                if (power <= 127) {
                    const float scale = power_of_two(power);
                    hand(first + h, weights[h].reference, weights[h].total, [=](int i) {
                        return __builtin_fmaf(total, means[i], float(own[i]) * scale) * units[i];
                    });
                } else {
                    const float scale = power_of_two(127);
                    const float beyond = power_of_two(power - 127);
                    hand(first + h, weights[h].reference, weights[h].total, [=](int i) {
                        return __builtin_fmaf(total, means[i], float(own[i]) * scale * beyond) * units[i];
                    });
                }
            }
        }
    }

    // --- One softmax ---

    static void attend(const CodedAttention& call, HeadRange range, const uint64_t* rows,
                       int64_t count, const CodedTokens* segments, int64_t segment_count,
                       const CodedWork& work, float* out) {
        const ExactFloats exact;
        const int group = call.group_size;
        const size_t dim = size_t(call.head_dim);
        const Places places(call);
        fetch_first(call, range, segments, segment_count);
        find_powers(call, range, rows, count, segments, segment_count, work);
        for (int head = range.first; head < range.first + range.count; ++head) {
            add_rows(call, places, head, rows, count, work);
        }
        for (int64_t i = 0; i < segment_count; ++i) {
            prepare(call, places, range, segments[i], work);
            for (int64_t first = 0; first < segments[i].tokens; first += kBlockTokens) {
                const CodedBlock block(segments[i], first, range);
                for (int number = 0; number < range.count; ++number) {
                    Ahead ahead =
                        next_lines(call, range, segments + i, segments + segment_count, first, number);
                    const int head = range.first + number;
                    const BlockPartials sums = work.sums.from(size_t(head) * group, kMostCodedChannels);
                    coded_block(call, head, block, work, sums.powers, sums.broken, ahead,
                                [&](int h, int32_t reference, int64_t total, auto outputs) {
                                    add(sums, h, places.width, reference, total, outputs);
                                });
                    // A short block has not had time for all.
                    while (ahead.touch()) {
                    }
                }
            }
        }
        for (size_t h = size_t(range.first) * group; h < size_t(range.first + range.count) * group; ++h) {
            alignas(64) float outputs[kMostCodedChannels];
            const BlockPartials sums = work.sums.from(h, kMostCodedChannels);
            for (int i = 0; i < call.head_dim; ++i) {
                outputs[i] = sums.outputs[places[i]];
            }
            divide({sums.powers, sums.totals, outputs, sums.broken}, call.head_dim, out + h * dim);
        }
    }

    // --- Blocks by themselves ---

    static void exact_blocks(const CodedAttention& call, const uint64_t* rows, int64_t count,
                             const CodedWork& work, const BlockPartials& out) {
        const ExactFloats exact;
        const size_t dim = size_t(call.head_dim);
        for (int head = call.first_head; head < call.first_head + call.head_count; ++head) {
            const size_t own = size_t(head) * call.group_size;
            for (int64_t first = 0; first < count; first += kBlockTokens) {
                const int tokens = int(count - first < kBlockTokens ? count - first : kBlockTokens);
                const BlockPartials block =
                    out.from(size_t(first / kBlockTokens) * call.query_heads() + own, dim);
                fix_products(call, head, rows + first, tokens, work.fixed, block.broken);
                exact_block(call, head, rows + first, tokens, work.fixed, tokens, nullptr,
                            [&](int h, int32_t reference, int64_t total, const float* outputs) {
                                block.powers[h] = reference;
                                block.totals[h] = total;
                                std::memcpy(block.outputs + h * dim, outputs, dim * sizeof *outputs);
                            });
            }
        }
    }

    static void coded_blocks(const CodedAttention& call, const CodedTokens& segment,
                             const CodedWork& work, const BlockPartials& out) {
        const ExactFloats exact;
        const size_t dim = size_t(call.head_dim);
        const Places places(call);
        Ahead none;
        prepare(call, places, call.heads(), segment, work);
        for (int head = call.first_head; head < call.first_head + call.head_count; ++head) {
            const size_t own = size_t(head) * call.group_size;
            for (int64_t first = 0; first < segment.tokens; first += kBlockTokens) {
                const BlockPartials to =
                    out.from(size_t(first / kBlockTokens) * call.query_heads() + own, dim);
                std::memset(to.broken, 0, size_t(call.group_size));
                const CodedBlock block(segment, first, {head, 1});
                coded_block(call, head, block, work, nullptr, to.broken, none,
                            [&](int h, int32_t reference, int64_t total, auto outputs) {
                                to.powers[h] = reference;
                                to.totals[h] = total;
                                for (int i = 0; i < call.head_dim; ++i) {
                                    to.outputs[h * dim + i] = outputs(places[i]);
                                }
                            });
            }
        }
    }

    static void merge(const CodedAttention& call, const BlockPartials& blocks, int64_t count,
                      float* out) {
        const ExactFloats exact;
        const size_t dim = size_t(call.head_dim);
        const size_t heads = size_t(call.query_heads());
        const size_t first = size_t(call.first_head) * call.group_size;
        for (size_t head = first; head < first + size_t(call.head_count) * call.group_size; ++head) {
            alignas(64) float outputs[kMostCodedChannels] = {};
            int32_t power = blocks.powers[head];
            int64_t total = 0;
            uint8_t broken = 0;
            for (int64_t i = 0; i < count; ++i) {
                const size_t own = i * heads + head;
                power = blocks.powers[own] > power ? blocks.powers[own] : power;
                broken |= blocks.broken[own];
            }
            const BlockPartials sums{&power, &total, outputs, &broken};
            for (int64_t i = 0; i < count; ++i) {
                const size_t own = i * heads + head;
                if (power - blocks.powers[own] <= -kLeastPower) {
                    const float* const block = blocks.outputs + own * dim;
                    add(sums, 0, call.head_dim, blocks.powers[own], blocks.totals[own],
                        [=](int i) { return block[i]; });
                }
            }
            divide(sums, call.head_dim, out + head * dim);
        }
    }

private:
    // X of rows, and R' of all tokens.
    static void find_powers(const CodedAttention& call, HeadRange range, const uint64_t* rows,
                            int64_t count, const CodedTokens* segments, int64_t segment_count,
                            const CodedWork& work) {
        const int64_t first = int64_t(range.first) * call.group_size;
        const int64_t stop = first + int64_t(range.count) * call.group_size;
        int32_t* const largest = work.sums.powers;
        for (int head = range.first; head < range.first + range.count; ++head) {
            const size_t own = size_t(head) * call.group_size;
            fix_products(call, head, rows, count, work.fixed + own * count, work.sums.broken + own);
        }
        for (int64_t h = first; h < stop; ++h) {
            largest[h] = count ? largest_of(work.fixed + h * count, count) : INT32_MIN;
        }
        // As L' lies in memory.
        for (int64_t i = 0; i < segment_count; ++i) {
            const CodedTokens& one = segments[i];
            for (int64_t h = first; one.tokens && h < stop; ++h) {
                const int32_t coded = fixed_aligned(largest_of(one.aligned + h * one.stride, one.tokens));
                largest[h] = coded > largest[h] ? coded : largest[h];
            }
        }
        for (int64_t h = first; h < stop; ++h) {
            largest[h] = reference_of(largest[h]);
        }
    }

    // Begins the sums of a KV head by its rows.
    static void add_rows(const CodedAttention& call, const Places& places, int head,
                         const uint64_t* rows, int64_t count, const CodedWork& work) {
        const int group = call.group_size;
        const size_t own = size_t(head) * group;
        const BlockPartials sums = work.sums.from(own, kMostCodedChannels);
        std::memset(sums.totals, 0, group * sizeof *sums.totals);
        std::memset(sums.outputs, 0, group * kMostCodedChannels * sizeof *sums.outputs);
        for (int64_t first = 0; first < count; first += kBlockTokens) {
            const int tokens = int(count - first < kBlockTokens ? count - first : kBlockTokens);
            exact_block(call, head, rows + first, tokens, work.fixed + own * count + first, count,
                        sums.powers,
                        [&](int h, int32_t reference, int64_t total, const float* outputs) {
                            add(sums, h, call.head_dim, reference, total,
                                [=](int i) { return outputs[i]; });
                        });
        }
        // From now on channels lie where sums of codes have them.
        for (int h = 0; h < group; ++h) {
            alignas(64) float moved[kMostCodedChannels] = {};
            float* const outputs = sums.outputs + size_t(h) * kMostCodedChannels;
            for (int i = 0; i < call.head_dim; ++i) {
                moved[places[i]] = outputs[i];
            }
            std::memcpy(outputs, moved, sizeof moved);
        }
    }

    static int chunk(const CodedAttention& call, int first) {
        const int left = call.group_size - first;
        return left < V::kChunkHeads ? left : V::kChunkHeads;
    }

    // X of x; whether one is no number.
    static bool fix_block(const float* __restrict products, int tokens, int32_t* __restrict out) {
        int broken = 0;
        for (int i = 0; i < tokens; ++i) {
            const float x = products[i];
            broken |= x != x;
            float limited = x != x ? 0.0f : x;
            limited = limited > kExactLimit ? kExactLimit : limited;
            limited = limited < -kExactLimit ? -kExactLimit : limited;
            out[i] = int32_t(__builtin_rintf(limited * 65536.0f));
        }
        return broken;
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

    // Adds a block to the sum; a head has room for kMostCodedChannels.
    template <class Outputs>
    static void add(const BlockPartials& to, int h, int width, int32_t reference, int64_t total,
                    Outputs outputs) {
        const int below = to.powers[h] - reference;
        const float moved = power_of_two(-below);
        float* __restrict sums = to.outputs + size_t(h) * kMostCodedChannels;
        for (int i = 0; i < width; ++i) {
            sums[i] += outputs(i) * moved;
        }
        to.totals[h] += total >> below;
    }

    // Every NaN is the same one, as instruction sets differ in that.
    static void divide(const BlockPartials& sums, int dim, float* __restrict out) {
        const float total = unit_total(sums.totals[0]);
        const float* __restrict outputs = sums.outputs;
        const bool broken = sums.broken[0];
        for (int i = 0; i < dim; ++i) {
            const float quotient = outputs[i] / total;
            out[i] = broken || quotient != quotient ? __builtin_nanf("") : quotient;
        }
    }
};

template <class V>
constexpr hillinfer::CodedKernels coded_kernels_of() {
    return {CodedHeads<V>::attend, CodedHeads<V>::exact_blocks, CodedHeads<V>::coded_blocks,
            CodedHeads<V>::merge};
}

}  // namespace
