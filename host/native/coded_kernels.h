// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens, for one instruction set (scoring contract, section 16).
//
// `V` has kChunkHeads (query heads whose sums are taken together), `weigh_units`, `arrange` and `sums`
// (codes of a block, and sums of them by addends), kAddsSums and where that is true `add_sums`, and
// `products` and `weighted` as `PlainRows` has them.
// Whatever it has, the bits are the same: sums of codes are integers, and floats are added in the
// contract's order.
#pragma once
#include "coded_block.h"
#include "coded_plain_rows.h"
#include "coded_sums.h"

namespace {

using hillinfer::BlockPartials;
using hillinfer::CodedWork;
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

    // Codes of a block's tokens in the KV head that was asked for last, arranged for sums.
    class BlockCodes {
    public:
        const typename V::Arranged& of(const CodedAttention& call, const CodedBlock& block, int head) {
            if (head != head_) {
                V::arrange(block.rows, size_t(head) * call.code_bytes(), call.code_bytes() / 16,
                           block.used, arranged_);
                head_ = head;
            }
            return arranged_;
        }

    private:
        int head_ = -1;
        typename V::Arranged arranged_;
    };

    // Weighs a block's tokens, some query heads at a time: act(unit, its weights, their addends).
    template <class Act>
    static void each_unit(const CodedAttention& call, HeadRange range, const CodedBlock& block, Act act) {
        const CodedTokens& segment = block.segment;
        CodedUnit units[kMostUnits];
        CodedWeights weights[kMostUnits][V::kChunkHeads];
        typename V::Addends addends[kMostUnits];
        int head = range.first, first = 0;
        while (head < range.first + range.count) {
            int count = 0;
            for (; count < kMostUnits && head < range.first + range.count; ++count) {
                const int64_t row = int64_t(head) * call.group_size + first;
                units[count] = {segment.aligned + row * segment.stride + block.start,
                                segment.stride, block.exponents_of(head), head, first, chunk(call, first)};
                first += V::kChunkHeads;
                if (first >= call.group_size) {
                    first = 0;
                    ++head;
                }
            }
            V::weigh_units(units, count, block.tokens, addends, weights);
            for (int i = 0; i < count; ++i) {
                act(units[i], weights[i], addends[i]);
            }
        }
    }

    // Hands on what a unit has summed: hand(query head of the group, R, W, outputs), where outputs(i) is
    // O of the channel whose place is i.
    template <class Hand>
    static void hand_sums(const CodedAttention& call, const CodedBlock& block, const CodedUnit& unit,
                          const CodedWeights* weights, const typename V::Addends& addends,
                          const CodedWork& work, BlockCodes& codes, Ahead& ahead, Hand hand) {
        alignas(64) int32_t sums[V::kChunkHeads][kMostCodedChannels];
        const float* const means = work.means + size_t(unit.head) * kMostCodedChannels;
        const float* const units = work.units + size_t(unit.head) * kMostCodedChannels;
        V::sums(codes.of(call, block, unit.head), call.code_bytes() / 16, block.used, addends, unit.heads,
                ahead, sums);
        for (int h = 0; h < unit.heads; ++h) {
            // 2^(U - 15) may be beyond a float where an exponent is one of no key: then every sum
            // but 0 is, and two factors overflow as one would.
            const int power = weights[h].top - 15;
            const float total = unit_total(weights[h].total);
            const int32_t* const own = sums[h];
            if (power <= 127) {
                const float scale = power_of_two(power);
                hand(unit.first + h, weights[h].reference, weights[h].total, [=](int i) {
                    return __builtin_fmaf(total, means[i], float(own[i]) * scale) * units[i];
                });
            } else {
                const float scale = power_of_two(127);
                const float beyond = power_of_two(power - 127);
                hand(unit.first + h, weights[h].reference, weights[h].total, [=](int i) {
                    return __builtin_fmaf(total, means[i], float(own[i]) * scale * beyond) * units[i];
                });
            }
        }
    }

    // Adds what a unit has summed to the sums of its KV head, but for heads whose block is too far below
    // the largest one.
    static void add_unit(const CodedAttention& call, const Places& places, const CodedBlock& block,
                         const CodedUnit& unit, const CodedWeights* weights,
                         const typename V::Addends& addends, const CodedWork& work, BlockCodes& codes,
                         Ahead& ahead) {
        const BlockPartials sums =
            work.sums.from(size_t(unit.head) * call.group_size, kMostCodedChannels);
        bool any = false, all_small = true;
        for (int h = 0; h < unit.heads; ++h) {
            any |= is_near(sums, unit.first + h, weights[h].reference);
            all_small &= weights[h].top <= kMostTop;
        }
        if (!any) {
            return;
        }
        if constexpr (V::kAddsSums) {
            if (all_small) {
                AddedSums<V::kChunkHeads> added;
                added.means = work.means + size_t(unit.head) * kMostCodedChannels;
                added.units = work.units + size_t(unit.head) * kMostCodedChannels;
                for (int h = 0; h < unit.heads; ++h) {
                    const int own = unit.first + h;
                    const bool near = is_near(sums, own, weights[h].reference);
                    const int below = near ? sums.powers[own] - weights[h].reference : 0;
                    const int power = weights[h].top - 15;
                    added.sums[h] = sums.outputs + size_t(own) * kMostCodedChannels;
                    // Powers of two: exact, whatever they are multiplied by first.
                    added.totals[h] = near ? unit_total(weights[h].total) * power_of_two(-power) : 0.0f;
                    added.factors[h] = near ? power_of_two(power - below) : 0.0f;
                    sums.totals[own] += near ? weights[h].total >> below : 0;
                }
                V::add_sums(codes.of(call, block, unit.head), call.code_bytes() / 16, block.used, addends,
                            unit.heads, ahead, added);
                return;
            }
        }
        hand_sums(call, block, unit, weights, addends, work, codes, ahead,
                  [&](int h, int32_t reference, int64_t total, auto outputs) {
                      if (is_near(sums, h, reference)) {
                          add(sums, h, places.width, reference, total, outputs);
                      }
                  });
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
                const CodedBlock block(call, segments[i], first, range);
                BlockCodes codes;
                Ahead ahead;
                each_unit(call, range, block, [&](const CodedUnit& unit, const CodedWeights* weights,
                                                  const typename V::Addends& addends) {
                    if (unit.first == 0) {
                        // Of a short block there was no time for all.
                        while (ahead.touch()) {
                        }
                        ahead = next_lines(call, range, segments + i, segments + segment_count, first,
                                           unit.head - range.first);
                        if (block.has_invalid(unit.head)) {
                            std::memset(work.sums.broken + size_t(unit.head) * group, 1, size_t(group));
                        }
                    }
                    add_unit(call, places, block, unit, weights, addends, work, codes, ahead);
                });
                while (ahead.touch()) {
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
                const CodedBlock block(call, segment, first, {head, 1});
                std::memset(to.broken, block.has_invalid(head), size_t(call.group_size));
                BlockCodes codes;
                each_unit(call, {head, 1}, block,
                          [&](const CodedUnit& unit, const CodedWeights* weights,
                              const typename V::Addends& addends) {
                              hand_sums(call, block, unit, weights, addends, work, codes, none,
                                        [&](int h, int32_t reference, int64_t total, auto outputs) {
                                            to.powers[h] = reference;
                                            to.totals[h] = total;
                                            for (int i = 0; i < call.head_dim; ++i) {
                                                to.outputs[h * dim + i] = outputs(places[i]);
                                            }
                                        });
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

    // Whether anything is left of a block beside the largest one.
    static bool is_near(const BlockPartials& of, int h, int32_t reference) {
        return of.powers[h] - reference <= -kLeastPower;
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
