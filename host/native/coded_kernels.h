// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens, for one instruction set (scoring contract, section 16).
//
// `V` has kChunkHeads (query heads whose sums are taken together), `arrange` and `sums` (codes of a
// block, and sums of them by addends), `powers` and `widen`. Whatever it has, the bits are the same:
// sums of codes are integers, and floats are added in the contract's order.
#pragma once
#include "coded_weights.h"

namespace {

using hillinfer::BlockPartials;
using hillinfer::CodedAttention;
using hillinfer::CodedTokens;
using hillinfer::CodedWork;
using hillinfer::HeadRange;
using hillinfer::kMostCodedChannels;

constexpr int kProductLanes = 16;
constexpr float kExactLimit = 32767.0f;
constexpr int32_t kAlignedLimit = (1 << 23) - 1;
// Below every X: a token that is not there.
constexpr int32_t kNoToken = INT32_MIN;

// What of a row is asked for early, as there is nothing to compute on before.
constexpr int kRowsAhead = 6;

inline const uint8_t* at(uint64_t address) { return reinterpret_cast<const uint8_t*>(address); }

inline void fetch_bytes(const uint8_t* from, int64_t bytes) {
    const uint8_t* const stop = from + bytes;
    for (const uint8_t* line = from; line < stop; line += 64) {
        __builtin_prefetch(line, 0, 2);
    }
}

// Items of a stored row as floats.
inline float float_of_half(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7FFF) << 13;
    // The exponent's bias grows by 112, also where the number is subnormal.
    const float finite = float_of_bits(magnitude) * power_of_two(112);
    const uint32_t wide = magnitude >= (0x7C00u << 13) ? magnitude | 0x7F800000u
                                                       : bits_of_float(finite);
    return float_of_bits(wide | uint32_t(bits & 0x8000) << 16);
}

inline void plain_widen(int32_t stored_type, const uint8_t* __restrict from, int count,
                        float* __restrict out) {
    for (int i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, sizeof bits);
        out[i] = stored_type == hillinfer::kFloat16
                     ? float_of_half(bits)
                     : float_of_bits(uint32_t(bits) << 16);
    }
}

template <class V>
struct CodedHeads {
    // --- Blocks of rows ---

    // X of rows in one KV head, out[query head * count + row]; whether one is no number.
    static void fix_products(const CodedAttention& call, int head, const uint64_t* rows,
                             int64_t count, int32_t* out, uint8_t* broken) {
        const int dim = call.head_dim;
        const int padded = (dim + kProductLanes - 1) / kProductLanes * kProductLanes;
        const size_t start = size_t(head) * dim * 2;
        alignas(64) float query[V::kChunkHeads][kMostCodedChannels];
        alignas(64) float key[kMostCodedChannels];
        for (int first = 0; first < call.group_size; first += V::kChunkHeads) {
            const int heads = chunk(call, first);
            for (int h = 0; h < heads; ++h) {
                const float* own = call.query + size_t(head * call.group_size + first + h) * dim;
                std::memset(query[h], 0, sizeof query[h]);
                std::memcpy(query[h], own, size_t(dim) * sizeof *own);
                broken[first + h] = 0;
            }
            std::memset(key, 0, sizeof key);
            for (int64_t row = 0; row < count; ++row) {
                if (row + kRowsAhead < count) {
                    fetch_bytes(at(rows[row + kRowsAhead]) + start, dim * 2);
                }
                V::widen(call.stored_type, at(rows[row]) + start, dim, key);
                for (int h = 0; h < heads; ++h) {
                    const float x = product(query[h], key, padded);
                    broken[first + h] |= x != x;
                    float limited = x != x ? 0.0f : x;
                    limited = limited > kExactLimit ? kExactLimit : limited;
                    limited = limited < -kExactLimit ? -kExactLimit : limited;
                    out[(first + h) * count + row] = int32_t(__builtin_rintf(limited * 65536.0f));
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
        alignas(64) float value[kMostCodedChannels];
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
                for (int i = 0; i < dim; ++i) {
                    outputs[h][i] = 0.0f;
                }
            }
            for (int token = 0; token < tokens; ++token) {
                if (token + kRowsAhead < tokens) {
                    fetch_bytes(at(rows[token + kRowsAhead]) + start, dim * 2);
                }
                V::widen(call.stored_type, at(rows[token]) + start, dim, value);
                for (int h = 0; h < heads; ++h) {
                    const float weight = weights[h][token];
                    for (int i = 0; i < dim; ++i) {
                        outputs[h][i] = __builtin_fmaf(weight, value[i], outputs[h][i]);
                    }
                }
            }
            for (int h = 0; h < heads; ++h) {
                if (!largest || largest[first + h] - own[h].reference <= -kLeastPower) {
                    hand(first + h, own[h].reference, own[h].total, outputs[h]);
                }
            }
        }
    }

    // --- Blocks of coded tokens ---

    // M and 2^(c-14) of a segment's channels, for `coded_block`.
    static void prepare(const CodedAttention& call, HeadRange range, const CodedTokens& segment,
                        const CodedWork& work) {
        for (int head = range.first; head < range.first + range.count; ++head) {
            float* const means = work.means + size_t(head) * kMostCodedChannels;
            float* const units = work.units + size_t(head) * kMostCodedChannels;
            const size_t own = size_t(head) * call.head_dim;
            for (int i = 0; i < call.head_dim; ++i) {
                means[i] = float(segment.means[own + i]);
                units[i] = power_of_two(segment.channel_exponents[own + i] - 14);
            }
        }
    }

    // Softmax over one block of a segment's tokens in one KV head, as `exact_block`. `broken` gets 1
    // where a token is invalid.
    template <class Hand>
    static void coded_block(const CodedAttention& call, int head, const CodedTokens& segment,
                            int64_t start, const CodedWork& work, const int32_t* largest,
                            uint8_t* broken, Hand hand) {
        const int64_t left = segment.tokens - start;
        const int tokens = int(left < kBlockTokens ? left : kBlockTokens);
        const int code_bytes = call.code_bytes();
        alignas(64) uint8_t exponents[kBlockTokens] = {};
        const uint8_t* rows[kBlockTokens];
        bool invalid = false;
        for (int i = 0; i < kBlockTokens; ++i) {
            // Behind the last token its codes are taken 0 times.
            const int64_t token = start + (i < tokens ? i : tokens - 1);
            rows[i] = at(segment.code_rows[token]) + size_t(head) * code_bytes;
            exponents[i] = at(segment.exponents[token])[head * segment.exponent_stride];
            invalid |= exponents[i] == hillinfer::kInvalidExponent;
            invalid |= segment.invalid_keys &&
                       segment.invalid_keys[size_t(head) * segment.stride + token];
        }
        for (int h = 0; h < call.group_size; ++h) {
            broken[h] |= invalid;
        }
        const float* const means = work.means + size_t(head) * kMostCodedChannels;
        const float* const units = work.units + size_t(head) * kMostCodedChannels;
        typename V::Arranged arranged;
        bool is_arranged = false;
        const int used = (tokens + 7) / 8 * 8;
        for (int first = 0; first < call.group_size; first += V::kChunkHeads) {
            const int heads = chunk(call, first);
            int32_t references[V::kChunkHeads];
            int64_t totals[V::kChunkHeads];
            int tops[V::kChunkHeads];
            bool near[V::kChunkHeads];
            bool any = false;
            alignas(64) uint16_t addends[V::kChunkHeads][kBlockTokens];
            alignas(64) int32_t sums[V::kChunkHeads][kMostCodedChannels];
            for (int h = 0; h < heads; ++h) {
                alignas(64) int32_t block[kBlockTokens];
                const int64_t row = int64_t(head) * call.group_size + first + h;
                take(segment.aligned + row * segment.stride + start, tokens, block, fixed_aligned);
                BlockWeights weights;
                weigh<V, false>(block, tokens, weights);
                tops[h] = addends_of(weights, exponents, addends[h]);
                references[h] = weights.reference;
                totals[h] = weights.total;
                near[h] = !largest || largest[first + h] - weights.reference <= -kLeastPower;
                any |= near[h];
            }
            if (!any) {
                continue;
            }
            if (!is_arranged) {
                V::arrange(rows, code_bytes / 16, used, arranged);
                is_arranged = true;
            }
            V::sums(arranged, code_bytes / 16, used, addends, heads, sums);
            for (int h = 0; h < heads; ++h) {
                if (!near[h]) {
                    continue;
                }
                alignas(64) float outputs[kMostCodedChannels];
                // 2^(U - 15) may be beyond a float where an exponent is one of no key.
                const int power = tops[h] - 15;
                const float scale = power_of_two(power < 127 ? power : 127);
                const float beyond = power_of_two(power < 127 ? 0 : power - 127);
                const float total = unit_total(totals[h]);
                for (int i = 0; i < call.head_dim; ++i) {
                    const float distance = float(sums[h][i]) * scale * beyond;
                    outputs[i] = __builtin_fmaf(total, means[i], distance) * units[i];
                }
                hand(first + h, references[h], totals[h], outputs);
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
        for (int head = range.first; head < range.first + range.count; ++head) {
            const size_t own = size_t(head) * group;
            int32_t* const fixed = work.fixed + own * count;
            const BlockPartials sums = work.sums.from(own, dim);
            fix_products(call, head, rows, count, fixed, sums.broken);
            for (int h = 0; h < group; ++h) {
                int32_t largest = count ? largest_of(fixed + h * count, count) : INT32_MIN;
                for (int64_t i = 0; i < segment_count; ++i) {
                    const CodedTokens& one = segments[i];
                    if (one.tokens) {
                        const int32_t* aligned = one.aligned + int64_t(own + h) * one.stride;
                        const int32_t coded = fixed_aligned(largest_of(aligned, one.tokens));
                        largest = coded > largest ? coded : largest;
                    }
                }
                sums.powers[h] = reference_of(largest);
                sums.totals[h] = 0;
            }
            std::memset(sums.outputs, 0, group * dim * sizeof *sums.outputs);
            for (int64_t first = 0; first < count; first += kBlockTokens) {
                const int tokens = int(count - first < kBlockTokens ? count - first : kBlockTokens);
                exact_block(call, head, rows + first, tokens, fixed + first, count, sums.powers,
                            [&](int h, int32_t reference, int64_t total, const float* outputs) {
                                add(sums, h, dim, reference, total, outputs);
                            });
            }
        }
        for (int64_t i = 0; i < segment_count; ++i) {
            prepare(call, range, segments[i], work);
            for (int64_t first = 0; first < segments[i].tokens; first += kBlockTokens) {
                for (int number = 0; number < range.count; ++number) {
                    fetch_next(call, range, segments + i, segments + segment_count, first, number);
                    const int head = range.first + number;
                    const BlockPartials sums = work.sums.from(size_t(head) * group, dim);
                    coded_block(call, head, segments[i], first, work, sums.powers, sums.broken,
                                [&](int h, int32_t reference, int64_t total, const float* outputs) {
                                    add(sums, h, dim, reference, total, outputs);
                                });
                }
            }
        }
        for (size_t h = size_t(range.first) * group; h < size_t(range.first + range.count) * group; ++h) {
            divide(work.sums.from(h, dim), call.head_dim, out + h * dim);
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
                            Storing{block, dim});
            }
        }
    }

    static void coded_blocks(const CodedAttention& call, const CodedTokens& segment,
                             const CodedWork& work, const BlockPartials& out) {
        const ExactFloats exact;
        const size_t dim = size_t(call.head_dim);
        prepare(call, call.heads(), segment, work);
        for (int head = call.first_head; head < call.first_head + call.head_count; ++head) {
            const size_t own = size_t(head) * call.group_size;
            for (int64_t first = 0; first < segment.tokens; first += kBlockTokens) {
                const BlockPartials block =
                    out.from(size_t(first / kBlockTokens) * call.query_heads() + own, dim);
                std::memset(block.broken, 0, size_t(call.group_size));
                coded_block(call, head, segment, first, work, nullptr, block.broken,
                            Storing{block, dim});
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
                    add(sums, 0, dim, blocks.powers[own], blocks.totals[own],
                        blocks.outputs + own * dim);
                }
            }
            divide(sums, call.head_dim, out + head * dim);
        }
    }

private:
    struct Storing {
        BlockPartials to;
        size_t dim;

        void operator()(int h, int32_t reference, int64_t total, const float* outputs) const {
            to.powers[h] = reference;
            to.totals[h] = total;
            std::memcpy(to.outputs + h * dim, outputs, dim * sizeof *outputs);
        }
    };

    static int chunk(const CodedAttention& call, int first) {
        const int left = call.group_size - first;
        return left < V::kChunkHeads ? left : V::kChunkHeads;
    }

    static int32_t fixed_aligned(int32_t aligned) {
        aligned = aligned > kAlignedLimit ? kAlignedLimit : aligned;
        return (aligned < -kAlignedLimit ? -kAlignedLimit : aligned) * 256;
    }

    template <class Fix>
    static void take(const int32_t* __restrict from, int tokens, int32_t* __restrict block, Fix fix) {
        if (tokens == kBlockTokens) {
            for (int i = 0; i < kBlockTokens; ++i) {
                block[i] = fix(from[i]);
            }
            return;
        }
        for (int i = 0; i < tokens; ++i) {
            block[i] = fix(from[i]);
        }
        for (int i = tokens; i < kBlockTokens; ++i) {
            block[i] = kNoToken;
        }
    }

    static float product(const float* __restrict query, const float* __restrict key, int padded) {
        alignas(64) float lanes[kProductLanes] = {};
        for (int j = 0; j < padded; j += kProductLanes) {
            for (int l = 0; l < kProductLanes; ++l) {
                lanes[l] = __builtin_fmaf(query[j + l], key[j + l], lanes[l]);
            }
        }
        for (int half = kProductLanes / 2; half; half /= 2) {
            for (int l = 0; l < half; ++l) {
                lanes[l] += lanes[l + half];
            }
        }
        return lanes[0];
    }

    static void add(const BlockPartials& to, int h, size_t dim, int32_t reference, int64_t total,
                    const float* __restrict outputs) {
        const int below = to.powers[h] - reference;
        const float moved = power_of_two(-below);
        float* __restrict sums = to.outputs + h * dim;
        for (size_t i = 0; i < dim; ++i) {
            sums[i] += outputs[i] * moved;
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

    // Asks for a part of the block after this one: as much of it as `number` is of the range.
    static void fetch_next(const CodedAttention& call, HeadRange range, const CodedTokens* segment,
                           const CodedTokens* stop, int64_t first, int number) {
        first += kBlockTokens;
        while (first >= segment->tokens) {
            if (++segment == stop) {
                return;
            }
            first = 0;
        }
        const int64_t left = segment->tokens - first;
        const int64_t tokens = left < kBlockTokens ? left : kBlockTokens;
        const size_t start = size_t(range.first) * call.code_bytes();
        for (int64_t i = tokens * number / range.count; i < tokens * (number + 1) / range.count; ++i) {
            fetch_bytes(at(segment->code_rows[first + i]) + start,
                        int64_t(range.count) * call.code_bytes());
        }
    }
};

template <class V>
constexpr hillinfer::CodedKernels coded_kernels_of() {
    return {CodedHeads<V>::attend, CodedHeads<V>::exact_blocks, CodedHeads<V>::coded_blocks,
            CodedHeads<V>::merge};
}

}  // namespace
