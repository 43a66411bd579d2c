// SPDX-License-Identifier: Apache-2.0
// Attention over tiles of rows, for the vectors of one instruction set.
//
// `V` has the type Float with kLanes lanes, kHeadsAtOnce (query heads whose sums stay in registers
// over four rows) and what arithmetic operators lack. Everything has internal linkage: each
// instruction set's file compiles its own copy, and the linker must not mix them.
#pragma once
#include <cstring>
#include <initializer_list>

#include "attention.h"

namespace {

using hillinfer::Attention;
using hillinfer::HeadRange;
using hillinfer::Partial;
using hillinfer::StoredType;
using hillinfer::kTileRows;

constexpr float kNoScore = -__builtin_inff();
constexpr int kRowsAtOnce = 4;
constexpr int kLineItems = 32;

// e^x for x <= 0; 0 where it would be subnormal, NaN where x is.
template <class V>
inline typename V::Float exponential(typename V::Float x) {
    using Float = typename V::Float;
    const Float least = V::all(-87.0f);
    // Of the larger exponent, so that adding it rounds to an integer.
    const Float rounder = V::all(12582912.0f);
    const Float limited = V::largest(least, x);
    const Float shifted = V::fma(limited, V::all(1.44269504088896341f), rounder);
    const Float power = shifted - rounder;
    Float rest = V::fma(power, V::all(-0.693359375f), limited);
    rest = V::fma(power, V::all(2.12194440e-4f), rest);
    Float sum = V::all(1.9875691500e-4f);
    for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                    1.6666665459e-1f, 5.0000001201e-1f}) {
        sum = V::fma(sum, rest, V::all(coefficient));
    }
    sum = V::fma(sum, rest * rest, rest) + V::all(1.0f);
    return V::zero_below(V::times_power(sum, shifted), x, least);
}

template <class V>
inline float exponential_of(float x) {
    return V::first(exponential<V>(V::all(x)));
}

// What scores are relative to: -inf less itself would be no number.
inline float base_of(float largest) { return largest == kNoScore ? 0.0f : largest; }

// Scores, as many as whole vectors have, become weights; returns what earlier sums are worth now.
template <class V>
inline float continue_softmax(float* scores, int count, float* largest, float* sum) {
    using Float = typename V::Float;
    Float most = V::all(*largest);
    for (int i = 0; i < count; i += V::kLanes) {
        most = V::largest(V::load(scores + i), most);
    }
    const float now = V::largest_of(most);
    const float base = base_of(now);
    const Float bases = V::all(base);
    Float total = V::all(0.0f);
    for (int i = 0; i < count; i += V::kLanes) {
        const Float weights = exponential<V>(V::load(scores + i) - bases);
        V::store(scores + i, weights);
        total = total + weights;
    }
    const float factor = exponential_of<V>(*largest - base);
    *largest = now;
    *sum = *sum * factor + V::sum(total);
    return factor;
}

// Lines of the rows that come next, touched a few at a time while others are computed on: the
// processor has only so many on their way at once.
class Ahead {
public:
    static constexpr int kLines = 8;

    Ahead(const uint64_t* rows, int count, size_t start, size_t bytes)
        : row_(rows), stop_(rows + count), start_(start), bytes_(bytes) {
        open_row();
    }

    // The next kLines of them.
    void fetch() {
        if (line_ + kLines * 64 < end_) {
#pragma GCC unroll 8
            for (int i = 0; i < kLines; ++i) {
                touch(line_ + i * 64);
            }
            line_ += kLines * 64;
            return;
        }
        for (int i = 0; i < kLines && line_ < end_; ++i) {
            touch(line_);
            line_ += 64;
            if (line_ >= end_) {
                ++row_;
                open_row();
            }
        }
    }

private:
    static void touch(uint64_t line) {
        __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
    }

    void open_row() {
        if (row_ != stop_) {
            line_ = (*row_ + start_) & ~uint64_t(63);
            end_ = *row_ + start_ + bytes_;
        }
    }

    const uint64_t* row_;
    const uint64_t* stop_;
    size_t start_;
    size_t bytes_;
    // Of the row that is open; the line is not below the end where none is left.
    uint64_t line_ = 0;
    uint64_t end_ = 0;
};

template <class V, StoredType kType>
struct TileAttention {
    using Float = typename V::Float;
    static constexpr int kLanes = V::kLanes;
    // Items that widen into two vectors, in an order of the stored type's own.
    static constexpr int kBlock = 2 * kLanes;

    template <int kValue>
    struct Number {
        static constexpr int value = kValue;
    };

    struct Whole {
        template <class Half>
        Float operator()(const uint16_t* block, Half) const {
            return V::template widen<kType, Half::value>(block);
        }
    };

    struct Some {
        int count;

        template <class Half>
        Float operator()(const uint16_t* block, Half) const {
            uint16_t some[kBlock] = {};
            std::memcpy(some, block, size_t(count) * sizeof *some);
            return V::template widen<kType, Half::value>(some);
        }
    };

    // Where the vectors have an item.
    static int place(int item) {
        if constexpr (kType == hillinfer::kFloat16) {
            return item;
        }
        const int inside = item % kBlock;
        return item - inside + inside % 2 * kLanes + inside / 2;
    }

    static const uint16_t* items(uint64_t row, size_t start) {
        return reinterpret_cast<const uint16_t*>(row + start);
    }

    // Inner products of four rows' keys and kHeads queries: scores[head * kTileRows + row].
    template <int kHeads>
    static void inner_products(const uint64_t* rows, size_t start, int head_dim,
                               const float* query, int padded_dim, float* scores) {
        const uint16_t* keys[kRowsAtOnce];
        Float sums[kHeads][kRowsAtOnce];
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            keys[row] = items(rows[row], start);
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                sums[head][row] = V::all(0.0f);
            }
        }
        const auto add = [&](int i, auto half, auto load) {
            Float own[kHeads];
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                own[head] = V::load(query + size_t(head) * padded_dim + i + half.value * kLanes);
            }
#pragma GCC unroll 4
            for (int row = 0; row < kRowsAtOnce; ++row) {
                const Float key = load(keys[row] + i, half);
#pragma GCC unroll 4
                for (int head = 0; head < kHeads; ++head) {
                    sums[head][row] = V::fma(key, own[head], sums[head][row]);
                }
            }
        };
        int i = 0;
        for (; i + kBlock <= head_dim; i += kBlock) {
            add(i, Number<0>{}, Whole{});
            add(i, Number<1>{}, Whole{});
        }
        if (i < head_dim) {
            add(i, Number<0>{}, Some{head_dim - i});
            add(i, Number<1>{}, Some{head_dim - i});
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            V::four_sums(sums[head], scores + head * kTileRows);
        }
    }

    // outputs = outputs * factor + weights * values, for kBlocks blocks.
    template <int kHeads, int kBlocks, class Load>
    static void weigh(const uint64_t* rows, int count, size_t start, const float* weights,
                      const float* factors, float* outputs, int padded_dim, Ahead& ahead,
                      Load load) {
        Float sums[kHeads][kBlocks][2];
#pragma GCC unroll 8
        for (int head = 0; head < kHeads; ++head) {
            const Float factor = V::all(factors[head]);
#pragma GCC unroll 8
            for (int i = 0; i < kBlocks * 2; ++i) {
                sums[head][i / 2][i % 2] =
                    V::load(outputs + size_t(head) * padded_dim + i * kLanes) * factor;
            }
        }
        for (int first = 0; first < count; first += Ahead::kLines) {
            ahead.fetch();
            const int stop = first + Ahead::kLines < count ? first + Ahead::kLines : count;
            for (int row = first; row < stop; ++row) {
                const uint16_t* values = items(rows[row], start);
                const uint16_t* again = values;
                // Or the compiler would keep what it loaded in a register and spill a sum.
                asm("" : "+r"(again));
                Float own[kHeads];
#pragma GCC unroll 8
                for (int head = 0; head < kHeads; ++head) {
                    own[head] = V::all(weights[head * kTileRows + row]);
                }
#pragma GCC unroll 8
                for (int block = 0; block < kBlocks; ++block) {
                    const Float low = load(values + block * kBlock, Number<0>{});
#pragma GCC unroll 8
                    for (int head = 0; head < kHeads; ++head) {
                        sums[head][block][0] = V::fma(low, own[head], sums[head][block][0]);
                    }
                    const Float high = load(again + block * kBlock, Number<1>{});
#pragma GCC unroll 8
                    for (int head = 0; head < kHeads; ++head) {
                        sums[head][block][1] = V::fma(high, own[head], sums[head][block][1]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int head = 0; head < kHeads; ++head) {
#pragma GCC unroll 8
            for (int i = 0; i < kBlocks * 2; ++i) {
                V::store(outputs + size_t(head) * padded_dim + i * kLanes, sums[head][i / 2][i % 2]);
            }
        }
    }

    // A line of each row's values at a time, so that the next query heads find it near.
    static void add_values(const uint64_t* rows, int count, size_t start, int head_dim, int group,
                           const float* weights, const float* factors, float* outputs,
                           int padded_dim, Ahead& ahead) {
        const auto all_heads = [&](int i, auto blocks, auto load) {
            each_subgroup(group, [&](int first, auto heads) {
                weigh<heads.value, blocks.value>(
                    rows, count, start + size_t(i) * 2, weights + first * kTileRows,
                    factors + first, outputs + size_t(first) * padded_dim + i, padded_dim, ahead,
                    load);
            });
        };
        int i = 0;
        for (; i + kLineItems <= head_dim; i += kLineItems) {
            all_heads(i, Number<kLineItems / kBlock>{}, Whole{});
        }
        for (; i + kBlock <= head_dim; i += kBlock) {
            all_heads(i, Number<1>{}, Whole{});
        }
        if (i < head_dim) {
            all_heads(i, Number<1>{}, Some{head_dim - i});
        }
    }

    // Scores become weights; returns what earlier sums are worth now.
    static float soften(float* scores, int count, float scaling, float* largest, float* sum) {
        const int padded = (count + kLanes - 1) / kLanes * kLanes;
        const Float scale = V::all(scaling);
        for (int row = count; row < padded; ++row) {
            scores[row] = 0;
        }
        for (int row = 0; row < padded; row += kLanes) {
            V::store(scores + row, V::load(scores + row) * scale);
        }
        for (int row = count; row < padded; ++row) {
            scores[row] = kNoScore;
        }
        return continue_softmax<V>(scores, padded, largest, sum);
    }

    static void add_tile(const Attention& attention, const float* query, HeadRange range,
                         const uint64_t* rows, int count, const uint64_t* next, int next_count,
                         const Partial& partial) {
        alignas(64) float scores[hillinfer::kMostHeads * kTileRows];
        alignas(64) float factors[hillinfer::kMostHeads];
        const int group = attention.group_size;
        const int padded_dim = attention.padded_dim();
        const int head_dim = attention.head_dim;
        const size_t keys_start = range.first * attention.head_bytes();
        const size_t values_start = attention.values_start() + keys_start;
        const size_t bytes = range.count * attention.head_bytes();
        const int fetches = int((kRowsAtOnce * attention.head_bytes() / 64 + Ahead::kLines - 1) /
                                Ahead::kLines);
        // Whole blocks of rows: the last row stands in for those that lack.
        uint64_t own[kTileRows];
        std::memcpy(own, rows, count * sizeof *own);
        for (int row = count; row < (count + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce; ++row) {
            own[row] = rows[count - 1];
        }
        Ahead values_ahead(rows, count, values_start, bytes);
        for (int row = 0; row < count; row += kRowsAtOnce) {
            for (int head = 0; head < range.count; ++head) {
                const size_t start = keys_start + head * attention.head_bytes();
                each_subgroup(group, [&](int first, auto heads) {
                    const size_t own_head = size_t(head) * group + first;
                    inner_products<heads.value>(own + row, start, head_dim,
                                                query + own_head * padded_dim, padded_dim,
                                                scores + own_head * kTileRows + row);
                });
                for (int i = 0; i < fetches; ++i) {
                    values_ahead.fetch();
                }
            }
        }
        for (int head = 0; head < range.count * group; ++head) {
            factors[head] = soften(scores + head * kTileRows, count, attention.scaling,
                                   partial.largest + head, partial.sums + head);
        }
        Ahead keys_ahead(next, next_count, keys_start, bytes);
        for (int head = 0; head < range.count; ++head) {
            const size_t first = size_t(head) * group;
            add_values(rows, count, values_start + head * attention.head_bytes(), head_dim, group,
                       scores + first * kTileRows, factors + first,
                       partial.outputs + first * padded_dim, padded_dim, keys_ahead);
        }
    }

    static void add_rows(const Attention& attention, const float* query, HeadRange range,
                         const uint64_t* rows, int64_t count, const Partial& partial) {
        for (int64_t start = 0; start < count; start += kTileRows) {
            const int own = at_most_a_tile(count - start);
            add_tile(attention, query, range, rows + start, own, rows + start + own,
                     at_most_a_tile(count - start - own), partial);
        }
    }

    // Scaled inner products of rows that begin with their keys, `stride` floats from one query
    // head's to the next.
    static void score_rows(const Attention& attention, const float* query, HeadRange range,
                           const uint64_t* rows, int64_t count, float* out, int64_t stride) {
        alignas(64) float scores[hillinfer::kMostHeads * kTileRows];
        const int group = attention.group_size;
        const int padded_dim = attention.padded_dim();
        const size_t keys_start = range.first * attention.head_bytes();
        const size_t bytes = range.count * attention.head_bytes();
        const int fetches = int((kRowsAtOnce * attention.head_bytes() / 64 + Ahead::kLines - 1) /
                                Ahead::kLines);
        for (int64_t first = 0; first < count; first += kTileRows) {
            const int own = at_most_a_tile(count - first);
            Ahead ahead(rows + first + own, at_most_a_tile(count - first - own), keys_start, bytes);
            for (int row = 0; row < own; row += kRowsAtOnce) {
                // The last row stands in for those that lack.
                uint64_t some[kRowsAtOnce];
                for (int i = 0; i < kRowsAtOnce; ++i) {
                    some[i] = rows[first + (row + i < own ? row + i : own - 1)];
                }
                for (int head = 0; head < range.count; ++head) {
                    each_subgroup(group, [&](int part, auto heads) {
                        const size_t own_head = size_t(head) * group + part;
                        inner_products<heads.value>(
                            some, keys_start + head * attention.head_bytes(), attention.head_dim,
                            query + own_head * padded_dim, padded_dim,
                            scores + own_head * kTileRows + row);
                    });
                    for (int i = 0; i < fetches; ++i) {
                        ahead.fetch();
                    }
                }
            }
            for (int head = 0; head < range.count * group; ++head) {
                for (int row = 0; row < own; ++row) {
                    out[head * stride + first + row] =
                        scores[head * kTileRows + row] * attention.scaling;
                }
            }
        }
    }

    // Adds up rows that begin with their values; `outputs` has padded_dim floats of each query head.
    static void weigh_rows(const Attention& attention, HeadRange range, const uint64_t* rows,
                           int64_t count, const float* weights, int64_t stride, float* outputs) {
        alignas(64) float own[hillinfer::kMostHeads * kTileRows];
        float factors[hillinfer::kMostHeads];
        const int group = attention.group_size;
        for (float& factor : factors) {
            factor = 1.0f;
        }
        for (int64_t first = 0; first < count; first += kTileRows) {
            const int tile = at_most_a_tile(count - first);
            const uint64_t* next = rows + first + tile;
            for (int head = 0; head < range.count * group; ++head) {
                std::memcpy(own + head * kTileRows, weights + head * stride + first,
                            tile * sizeof *own);
            }
            const size_t start = range.first * attention.head_bytes();
            Ahead ahead(next, at_most_a_tile(count - first - tile), start,
                        range.count * attention.head_bytes());
            for (int head = 0; head < range.count; ++head) {
                const size_t place = size_t(head) * group;
                add_values(rows + first, tile, start + head * attention.head_bytes(),
                           attention.head_dim, group, own + place * kTileRows, factors + place,
                           outputs + place * attention.padded_dim(), attention.padded_dim(), ahead);
            }
        }
    }

private:
    static int at_most_a_tile(int64_t rows) { return int(rows < kTileRows ? rows : kTileRows); }

    // Parts of a group of about the same size, none larger than the registers hold.
    template <class Call>
    static void each_subgroup(int group, Call call) {
        const int parts = (group + V::kHeadsAtOnce - 1) / V::kHeadsAtOnce;
        for (int part = 0, first = 0; part < parts; ++part) {
            const int heads = (group - first + parts - part - 1) / (parts - part);
            switch (heads) {
                case 1: call(first, Number<1>{}); break;
                case 2: call(first, Number<2>{}); break;
                case 3: call(first, Number<3>{}); break;
                default:
                    if constexpr (V::kHeadsAtOnce >= 4) {
                        call(first, Number<4>{});
                    }
            }
            first += heads;
        }
    }
};

template <class V>
void add_attention_rows(const Attention& attention, const float* query, HeadRange range,
                        const uint64_t* rows, int64_t count, const Partial& partial) {
    const auto add = attention.stored_type == hillinfer::kBfloat16
                         ? TileAttention<V, hillinfer::kBfloat16>::add_rows
                         : TileAttention<V, hillinfer::kFloat16>::add_rows;
    add(attention, query, range, rows, count, partial);
}

template <class V>
void score_rows(const Attention& attention, const float* query, HeadRange range,
                const uint64_t* rows, int64_t count, float* out, int64_t stride) {
    const auto score = attention.stored_type == hillinfer::kBfloat16
                           ? TileAttention<V, hillinfer::kBfloat16>::score_rows
                           : TileAttention<V, hillinfer::kFloat16>::score_rows;
    score(attention, query, range, rows, count, out, stride);
}

template <class V>
void weigh_rows(const Attention& attention, HeadRange range, const uint64_t* rows, int64_t count,
                const float* weights, int64_t stride, float* outputs) {
    const auto weigh = attention.stored_type == hillinfer::kBfloat16
                           ? TileAttention<V, hillinfer::kBfloat16>::weigh_rows
                           : TileAttention<V, hillinfer::kFloat16>::weigh_rows;
    weigh(attention, range, rows, count, weights, stride, outputs);
}

template <class V>
int item_place(int32_t stored_type, int item) {
    return stored_type == hillinfer::kBfloat16 ? TileAttention<V, hillinfer::kBfloat16>::place(item)
                                               : TileAttention<V, hillinfer::kFloat16>::place(item);
}

template <class V>
void merge_partials(const Partial& into, const Partial& other, int heads, int padded_dim) {
    for (int head = 0; head < heads; ++head) {
        const float before = into.largest[head];
        const float largest = other.largest[head] > before ? other.largest[head] : before;
        const float base = base_of(largest);
        const float own = exponential_of<V>(before - base);
        const float added = exponential_of<V>(other.largest[head] - base);
        into.largest[head] = largest;
        into.sums[head] = into.sums[head] * own + other.sums[head] * added;
        float* to = into.outputs + size_t(head) * padded_dim;
        const float* from = other.outputs + size_t(head) * padded_dim;
        for (int i = 0; i < padded_dim; i += V::kLanes) {
            V::store(to + i, V::load(to + i) * V::all(own) + V::load(from + i) * V::all(added));
        }
    }
}

// Reads rows as fast as the machine can, for comparison; returns a sum so that nobody leaves it out.
inline uint64_t read_rows(const uint64_t* rows, int64_t count, int64_t row_bytes) {
    // Compilers have vectors of this size on nearly any machine, or make them of smaller ones.
    typedef uint64_t Words __attribute__((vector_size(32)));
    constexpr int kRowsAhead = 4;
    Words even = {};
    Words odd = {};
    for (int64_t row = 0; row < count; ++row) {
        const char* own = reinterpret_cast<const char*>(rows[row]);
        const char* next =
            reinterpret_cast<const char*>(rows[row + kRowsAhead < count ? row + kRowsAhead : row]);
        for (int64_t i = 0; i + 64 <= row_bytes; i += 64) {
            __builtin_prefetch(next + i, 0, 2);
            Words first;
            Words second;
            std::memcpy(&first, own + i, sizeof first);
            std::memcpy(&second, own + i + 32, sizeof second);
            even += first;
            odd += second;
        }
    }
    even += odd;
    return even[0] + even[1] + even[2] + even[3];
}

template <class V>
constexpr hillinfer::AttentionKernels attention_kernels_of(hillinfer::PromptKernels prompts) {
    return {add_attention_rows<V>, merge_partials<V>, item_place<V>, read_rows, score_rows<V>,
            weigh_rows<V>, prompts};
}

}  // namespace
