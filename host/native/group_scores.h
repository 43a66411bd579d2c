// SPDX-License-Identifier: Apache-2.0
// From a group of 64 tokens to L' and to tuples, for one instruction set (contract, sections 5, 7
// and 11).
//
// `Products` makes inner products; the loops over 64 tokens here are plain so that the compiler
// makes vector code of them for the flags this file is compiled with.
#pragma once
#include <new>

#include "channel_statistics.h"
#include "contract.h"
#include "head_offset.h"
#include "kernels.h"
#include "key_coding.h"
#include "near_scores.h"
#include "query_coding.h"

namespace {

using hillinfer::GroupInput;
using hillinfer::Shape;
using hillinfer::TilesAhead;
using hillinfer::TilesToCome;
using hillinfer::kGroupTokens;
using hillinfer::kInvalidExponent;

// `zero_code` is what unsigned codes of `Products` have added to them.
template <class Products>
inline Correction correction(const Shape& shape, int32_t code_sum) {
    const int32_t added = Products::zero_code(shape.code_bits) * code_sum;
    // INT2: P = 2 * sum(q * kappa) + sum(q).
    return shape.code_bits == 2 ? Correction{1, 2 * added - code_sum} : Correction{0, added};
}

template <class Products>
void group_products(const Shape& shape, const GroupInput& in) {
    const uint8_t* tile = in.group + size_t(shape.kv_heads) * hillinfer::kBeatBytes;
    const int once = Products::tiles_at_once(shape);
    for (int number = 0; number < shape.tiles(); number += once) {
        Products::tiles(shape, tile + number * shape.tile_bytes(), in.arranged,
                        in.products + number * shape.tile_tokens());
    }
}

// Of tiles that have some tokens.
template <class Products>
void some_group_products(const Shape& shape, const GroupInput& in, uint64_t tokens,
                         TilesToCome coming) {
    const uint8_t* tile = in.group + size_t(shape.kv_heads) * hillinfer::kBeatBytes;
    const uint64_t own = (uint64_t(1) << shape.tile_tokens()) - 1;
    for (int number = 0; number < shape.tiles(); ++number) {
        const int first = number * shape.tile_tokens();
        if (tokens >> first & own) {
            Products::tiles(shape, tile + number * shape.tile_bytes(), in.arranged,
                            in.products + first, coming.ahead());
            ++coming.tiles;
        }
    }
}

inline void align_row(const int32_t* __restrict products, const uint8_t* __restrict exponents,
                      Correction correction, int32_t query_exponent, int32_t offset,
                      int32_t* __restrict out) {
    for (int i = 0; i < kGroupTokens; ++i) {
        const int32_t product = (products[i] << correction.shift) - correction.bias;
        out[i] = aligned(product, alignment(query_exponent, exponents[i])) + offset;
    }
}

inline void add_weights(const int32_t* __restrict log_weights, int32_t offset,
                        double* __restrict sums) {
    for (int i = 0; i < kGroupTokens; ++i) {
        sums[i] += double(weight(log_weights[i] - offset));
    }
}

inline void add_values(const int32_t* __restrict log_weights, int32_t* __restrict sums) {
    for (int i = 0; i < kGroupTokens; ++i) {
        sums[i] += log_weights[i];
    }
}

// The sums of one selected set while its heads come; weights as doubles, or as int32 where near.
template <class Weight>
struct SetSums {
    alignas(64) Weight weights[kGroupTokens];
    alignas(64) int32_t values[kGroupTokens];
    alignas(64) int32_t valid[kGroupTokens];

    void clear(bool raw) {
        for (int i = 0; i < kGroupTokens; ++i) {
            valid[i] = -1;
        }
        for (int i = 0; raw && i < kGroupTokens; ++i) {
            values[i] = 0;
        }
        for (int i = 0; !raw && i < kGroupTokens; ++i) {
            weights[i] = 0;
        }
    }

    void put(const Shape& shape, int32_t offset, int64_t position, int tokens, uint32_t* out) {
        alignas(64) uint32_t tuples[kGroupTokens];
        for (int i = 0; i < kGroupTokens; ++i) {
            const int32_t code = shape.rule == hillinfer::kWeightSum
                                     ? weight_sum_code(weights[i])
                                     : raw_sum_code(values[i] - offset);
            tuples[i] = uint32_t(code & valid[i]) << 16 | (uint32_t(position + i) & 0xFFFF);
        }
        std::memcpy(out, tuples, size_t(tokens) * sizeof *out);
    }
};

// Adds up the heads of each set and writes its tuples; `next_row` yields L' of 64 tokens.
template <class NextRow>
inline void score_sets(const Shape& shape, const uint8_t* exponents, const int32_t* offsets,
                       int64_t position, int tokens, uint32_t* out, int64_t stride,
                       NextRow next_row) {
    SetSums<double> sums;
    const bool raw = shape.rule == hillinfer::kRawSum;
    for (int head = 0, row = 0; head < shape.kv_heads; ++head) {
        if (head == 0 || shape.scope == hillinfer::kKvHead) {
            sums.clear(raw);
        }
        mark_invalid(exponents + head * kGroupTokens, sums.valid);
        for (int i = 0; i < shape.heads; ++i, ++row) {
            const int32_t* log_weights = next_row(head, row);
            if (raw) {
                add_values(log_weights, sums.values);
            } else {
                add_weights(log_weights, offsets[row], sums.weights);
            }
        }
        if (shape.scope == hillinfer::kKvHead) {
            sums.put(shape, raw ? offsets[head] : 0, position, tokens, out + head * stride);
        }
    }
    if (shape.scope == hillinfer::kLayer) {
        sums.put(shape, raw ? offsets[0] : 0, position, tokens, out);
    }
}

// The same where all numbers are small, else false: see near_scores.h. `rows` add no offset where
// sums are raw.
template <class Products>
inline bool score_near_sets(const Shape& shape, const GroupInput& in, const NearRow* rows,
                            const int32_t* offsets, int64_t position, int tokens, uint32_t* out,
                            int64_t stride) {
    SetSums<int32_t> sums;
    const bool raw = shape.rule == hillinfer::kRawSum;
    const int32_t limit = near_limit(shape.rows());
    const int32_t* products = in.products;
    for (int head = 0; head < shape.kv_heads; ++head) {
        if (head == 0 || shape.scope == hillinfer::kKvHead) {
            sums.clear(raw);
        }
        const uint8_t* stored = in.group + head * kGroupTokens;
        const bool near =
            raw ? add_near_values(stored, products, rows, shape.heads, sums.values, sums.valid)
                : Products::add_near_weights(stored, products, rows, shape.heads, limit,
                                             sums.weights, sums.valid);
        if (!near) {
            return false;
        }
        rows += shape.heads;
        products += shape.heads * kGroupTokens;
        if (shape.scope == hillinfer::kKvHead) {
            sums.put(shape, raw ? offsets[head] : 0, position, tokens, out + head * stride);
        }
    }
    if (shape.scope == hillinfer::kLayer) {
        sums.put(shape, raw ? offsets[0] : 0, position, tokens, out);
    }
    return true;
}

template <class Products>
struct GroupScores {
    static void log_weights(const Shape& shape, const GroupInput& in, int32_t* out) {
        group_products<Products>(shape, in);
        const int32_t nu = largest_nu(shape);
        alignas(64) int32_t exponents[kGroupTokens];
        for (int head = 0, row = 0; head < shape.kv_heads; ++head) {
            const uint8_t* stored = in.group + head * kGroupTokens;
            const int32_t largest = near_exponents(stored, exponents);
            for (int i = 0; i < shape.heads; ++i, ++row) {
                const int32_t* products = in.products + row * kGroupTokens;
                const NearRow own = near_row(shape, in, nu, row, 0);
                if (own.fits(largest)) {
                    near_values(products, exponents, own, out + row * kGroupTokens);
                } else {
                    align(shape, in, head, row, out + row * kGroupTokens);
                }
            }
        }
    }

    static void some_log_weights(const Shape& shape, const GroupInput& in, uint64_t tokens,
                                 TilesToCome coming, int32_t* out, int64_t stride) {
        alignas(64) int32_t exponents[kGroupTokens], far[kGroupTokens];
        const int32_t nu = largest_nu(shape);
        if (coming.tiles) {
            some_group_products<Products>(shape, in, tokens, coming);
        }
        for (int head = 0, row = 0; head < shape.kv_heads; ++head) {
            const int32_t largest = near_exponents(in.group + head * kGroupTokens, exponents);
            for (int i = 0; i < shape.heads; ++i, ++row) {
                const NearRow own = near_row(shape, in, nu, row, 0);
                int32_t* to = out + row * stride;
                if (own.fits(largest)) {
                    Products::some_values(in.products + row * kGroupTokens, exponents, own, tokens, to);
                    continue;
                }
                align(shape, in, head, row, far);
                for (uint64_t left = tokens; left; left &= left - 1) {
                    *to++ = far[__builtin_ctzll(left)];
                }
            }
        }
    }

    static void tuples(const Shape& shape, const GroupInput& first, const int32_t* offsets,
                       int64_t position, int64_t tokens, uint32_t* out, int64_t stride) {
        NearRow* const rows = near_rows(shape, first, offsets);
        GroupInput in = first;
        for (int64_t done = 0; done < tokens; done += kGroupTokens) {
            const int count = int(tokens - done < kGroupTokens ? tokens - done : kGroupTokens);
            group_products<Products>(shape, in);
            if (!score_near_sets<Products>(shape, in, rows, offsets, position + done, count,
                                           out + done, stride)) {
                score_far_sets(shape, in, offsets, position + done, count, out + done, stride);
            }
            in.group += shape.group_bytes();
            in.products += in.products_stride;
        }
    }

    static void finish(const Shape& shape, const int32_t* log_weights, const uint8_t* exponents,
                       const int32_t* offsets, int64_t position, int tokens, uint32_t* out,
                       int64_t stride) {
        score_sets(shape, exponents, offsets, position, tokens, out, stride,
                   [&](int, int row) { return log_weights + row * kGroupTokens; });
    }

private:
    static void score_far_sets(const Shape& shape, const GroupInput& in, const int32_t* offsets,
                               int64_t position, int tokens, uint32_t* out, int64_t stride) {
        alignas(64) int32_t log_weights[kGroupTokens];
        score_sets(shape, in.group, offsets, position, tokens, out, stride,
                   [&](int head, int row) {
                       align(shape, in, head, row, log_weights);
                       return log_weights;
                   });
    }

    static NearRow* near_rows(const Shape& shape, const GroupInput& in, const int32_t* offsets) {
        const bool raw = shape.rule == hillinfer::kRawSum;
        const int32_t nu = largest_nu(shape);
        static_assert(sizeof(NearRow) == hillinfer::kRowWords * sizeof(int32_t));
        NearRow* const rows = reinterpret_cast<NearRow*>(in.row_words);
        for (int row = 0; row < shape.rows(); ++row) {
            new (rows + row) NearRow(near_row(shape, in, nu, row, raw ? 0 : offsets[row]));
        }
        return rows;
    }

    static NearRow near_row(const Shape& shape, const GroupInput& in, int32_t nu, int row,
                            int32_t less) {
        return NearRow(correction<Products>(shape, in.query->sums[row]), in.query->exponents[row],
                       nu, in.query->corrections[row] - less);
    }

    static void align(const Shape& shape, const GroupInput& in, int head, int row, int32_t* out) {
        align_row(in.products + row * kGroupTokens, in.group + head * kGroupTokens,
                  correction<Products>(shape, in.query->sums[row]), in.query->exponents[row],
                  in.query->corrections[row], out);
    }
};

// As wide as this file's flags allow: of wider ones, or of an array, gcc makes worse code.
#if defined(__AVX512F__)
constexpr size_t kWordBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kWordBytes = 32;
#else
constexpr size_t kWordBytes = 16;
#endif
using Words = uint64_t __attribute__((vector_size(kWordBytes)));

inline uint64_t read_sum(const uint8_t* bytes, size_t count) {
    constexpr int kSums = 4;
    constexpr size_t kOnce = kSums * kWordBytes;
    Words sums[kSums] = {};
    for (size_t i = 0; i + kOnce <= count; i += kOnce) {
        for (size_t ahead = 0; ahead < kOnce; ahead += hillinfer::kBeatBytes) {
            __builtin_prefetch(bytes + i + 8192 + ahead);
        }
#pragma GCC unroll 4
        for (int part = 0; part < kSums; ++part) {
            Words words;
            std::memcpy(&words, bytes + i + part * kWordBytes, sizeof words);
            sums[part] += words;
        }
    }
    const Words sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    uint64_t total = 0;
    for (size_t lane = 0; lane < kWordBytes / sizeof total; ++lane) {
        total += sum[lane];
    }
    return total;
}

template <class Products>
constexpr hillinfer::Kernels kernels_of(const char* name) {
    return {name,
            Products::arranged_bytes,
            Products::arrange,
            code_query,
            GroupScores<Products>::log_weights,
            GroupScores<Products>::some_log_weights,
            GroupScores<Products>::tuples,
            GroupScores<Products>::finish,
            log_sum,
            take_statistics,
            encode_keys,
            encode_values,
            read_sum};
}

}  // namespace
