// SPDX-License-Identifier: Apache-2.0
// Attention of many queries to packed keys and values, for the vectors of one instruction set.
//
// `V` is as in attention_kernels.h, with kVectorsAtOnce: vectors of as many items that six rows' sums
// stay in registers for. Everything has internal linkage, as there.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_kernels.h"
#include "prompt_attention.h"

namespace {

using hillinfer::kPromptKeys;
using hillinfer::kPromptQueries;
using hillinfer::PromptBlock;

// As in the contract.
constexpr int kMostDim = 256;

template <class V>
struct PromptTiles {
    using Float = typename V::Float;
    static constexpr int kLanes = V::kLanes;
    static constexpr int kVectors = V::kVectorsAtOnce;
    // Rows whose sums stay in registers.
    static constexpr int kRows = 6;
    // Keys of a panel, which one product takes.
    static constexpr int kPanel = kVectors * kLanes;
    static_assert(kPromptQueries % kRows == 0 && kPromptKeys % kPanel == 0);

    // Items of any type, as floats.
    static void widen(const void* items, int64_t first, int count, int32_t item_type, float* to) {
        if (item_type == hillinfer::kFloat32Items) {
            std::memcpy(to, static_cast<const float*>(items) + first, size_t(count) * sizeof *to);
            return;
        }
        const uint16_t* const own = static_cast<const uint16_t*>(items) + first;
        int i = 0;
        if (item_type == hillinfer::kBfloat16Items) {
            for (; i < count; ++i) {
                const uint32_t bits = uint32_t(own[i]) << 16;
                std::memcpy(to + i, &bits, sizeof bits);
            }
        }
        for (; i + kLanes <= count; i += kLanes) {
            V::store(to + i, V::template widen<hillinfer::kFloat16, 0>(own + i));
        }
        if (i < count) {
            uint16_t some[kLanes] = {};
            std::memcpy(some, own + i, size_t(count - i) * sizeof *some);
            alignas(64) float widened[kLanes];
            V::store(widened, V::template widen<hillinfer::kFloat16, 0>(some));
            std::memcpy(to + i, widened, size_t(count - i) * sizeof *widened);
        }
    }

    static int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

    // Panels of keys by dimension, then rows of values.
    static int64_t packed_floats(int32_t head_dim) {
        return kPromptKeys * int64_t(head_dim + padded(head_dim));
    }

    static const float* values_in(const float* packed, int head_dim) {
        return packed + kPromptKeys * int64_t(head_dim);
    }

    static void pack(const PromptBlock& block, int kv_head, int64_t first, float* packed) {
        const int head_dim = block.head_dim;
        const int count = int(std::min(block.tokens - first, kPromptKeys));
        // A vector's keys at a time: their items lie near when they are turned.
        alignas(64) float rows[kLanes][kMostDim];
        for (int key = 0; key < count; key += kLanes) {
            for (int own = 0; own < kLanes; ++own) {
                if (key + own < count) {
                    widen(block.keys,
                                kv_head * block.key_head_stride +
                                    (first + key + own) * block.key_stride,
                                head_dim, block.item_type, rows[own]);
                } else {
                    std::fill_n(rows[own], head_dim, 0.0f);
                }
            }
            float* const panel = packed + key / kPanel * kPanel * int64_t(head_dim) + key % kPanel;
            for (int i = 0; i < head_dim; ++i) {
                for (int own = 0; own < kLanes; ++own) {
                    panel[i * int64_t(kPanel) + own] = rows[own][i];
                }
            }
        }
        // What is left of the last panel is multiplied too.
        for (int key = (count + kLanes - 1) / kLanes * kLanes; key % kPanel; key += kLanes) {
            float* const panel = packed + key / kPanel * kPanel * int64_t(head_dim) + key % kPanel;
            for (int i = 0; i < head_dim; ++i) {
                std::fill_n(panel + i * int64_t(kPanel), kLanes, 0.0f);
            }
        }
        float* const values = packed + kPromptKeys * int64_t(head_dim);
        const int row = padded(head_dim);
        for (int key = 0; key < count; ++key) {
            float* const to = values + key * int64_t(row);
            widen(block.values,
                        kv_head * block.value_head_stride + (first + key) * block.value_stride,
                        head_dim, block.item_type, to);
            std::fill(to + head_dim, to + row, 0.0f);
        }
    }

    // scores[row * kPromptKeys + key] of kRows queries, by dimension, and a panel.
    static void inner_products(const float* queries, const float* panel, int head_dim,
                               float* scores) {
        Float sums[kRows][kVectors];
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kVectors; ++own) {
                sums[row][own] = V::all(0.0f);
            }
        }
        for (int i = 0; i < head_dim; ++i) {
            Float keys[kVectors];
#pragma GCC unroll 4
            for (int own = 0; own < kVectors; ++own) {
                keys[own] = V::load(panel + own * kLanes);
            }
            panel += kPanel;
#pragma GCC unroll 6
            for (int row = 0; row < kRows; ++row) {
                const Float query = V::all(queries[row]);
#pragma GCC unroll 4
                for (int own = 0; own < kVectors; ++own) {
                    sums[row][own] = V::fma(keys[own], query, sums[row][own]);
                }
            }
            queries += kRows;
        }
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kVectors; ++own) {
                V::store(scores + row * kPromptKeys + own * kLanes, sums[row][own]);
            }
        }
    }

    // outputs = outputs * factors + weights * values, for kOwn vectors of kRows queries.
    template <int kOwn>
    static void weigh(const float* weights, const float* factors, const float* values, int count,
                      int row_floats, float* outputs) {
        Float sums[kRows][kOwn];
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
            const Float factor = V::all(factors[row]);
#pragma GCC unroll 4
            for (int own = 0; own < kOwn; ++own) {
                sums[row][own] = V::load(outputs + row * row_floats + own * kLanes) * factor;
            }
        }
        for (int key = 0; key < count; ++key) {
            Float loaded[kOwn];
#pragma GCC unroll 4
            for (int own = 0; own < kOwn; ++own) {
                loaded[own] = V::load(values + own * kLanes);
            }
            values += row_floats;
#pragma GCC unroll 6
            for (int row = 0; row < kRows; ++row) {
                const Float weight = V::all(weights[row * kPromptKeys + key]);
#pragma GCC unroll 4
                for (int own = 0; own < kOwn; ++own) {
                    sums[row][own] = V::fma(loaded[own], weight, sums[row][own]);
                }
            }
        }
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int own = 0; own < kOwn; ++own) {
                V::store(outputs + row * row_floats + own * kLanes, sums[row][own]);
            }
        }
    }

    template <int kOwn>
    static void weigh_rest(int vectors, const float* weights, const float* factors,
                           const float* values, int count, int row_floats, float* outputs) {
        if constexpr (kOwn > 0) {
            if (vectors == kOwn) {
                weigh<kOwn>(weights, factors, values, count, row_floats, outputs);
            } else {
                weigh_rest<kOwn - 1>(vectors, weights, factors, values, count, row_floats, outputs);
            }
        }
    }

    static void weigh_all(const float* weights, const float* factors, const float* values,
                          int count, int row_floats, float* outputs) {
        int i = 0;
        for (; i + kVectors * kLanes <= row_floats; i += kVectors * kLanes) {
            weigh<kVectors>(weights, factors, values + i, count, row_floats, outputs + i);
        }
        weigh_rest<kVectors - 1>((row_floats - i) / kLanes, weights, factors, values + i, count,
                                 row_floats, outputs + i);
    }

    // Further keys of one query, `first` to before `stop`.
    static void weigh_row(const float* weights, const float* values, int first, int stop,
                          int row_floats, float* outputs) {
        for (int key = first; key < stop; ++key) {
            const Float weight = V::all(weights[key]);
            const float* const own = values + key * int64_t(row_floats);
            for (int i = 0; i < row_floats; i += kLanes) {
                V::store(outputs + i, V::fma(V::load(own + i), weight, V::load(outputs + i)));
            }
        }
    }

    static void attend(const PromptBlock& block, int query_head, int64_t first,
                       const float* packed) {
        const int head_dim = block.head_dim;
        const int row_floats = padded(head_dim);
        const int queries = int(std::min(block.queries - first, kPromptQueries));
        const int rounded = (queries + kRows - 1) / kRows * kRows;
        alignas(64) float scores[kPromptQueries * kPromptKeys];
        alignas(64) float outputs[kPromptQueries * kMostDim];
        alignas(64) float scaled[kPromptQueries * kMostDim];
        float largest[kPromptQueries];
        float sums[kPromptQueries];
        float factors[kPromptQueries];
        float* const log_sums = block.log_sums + query_head * block.log_sum_stride + first;
        float* const out =
            block.out + query_head * block.out_head_stride + first * block.out_stride;
        for (int row = 0; row < rounded; ++row) {
            const bool is_there = row < queries;
            const float* query = block.query + query_head * block.query_head_stride +
                                 (first + row) * block.query_stride;
            float* const to = scaled + row / kRows * kRows * head_dim + row % kRows;
            for (int i = 0; i < head_dim; ++i) {
                to[i * kRows] = is_there ? query[i] * block.scaling : 0.0f;
            }
            // What there is counts as one row whose score is the logarithm of its denominator.
            largest[row] = is_there ? log_sums[row] : kNoScore;
            const bool is_first = largest[row] == kNoScore;
            sums[row] = is_first ? 0.0f : 1.0f;
            float* const output = outputs + row * row_floats;
            std::fill_n(output, row_floats, 0.0f);
            if (!is_first) {
                std::copy_n(out + row * block.out_stride, head_dim, output);
            }
        }
        const int64_t seen =
            block.is_causal ? std::min(block.tokens, first + queries) : block.tokens;
        const int64_t part_floats = packed_floats(head_dim);
        for (int64_t key = 0; key < seen; key += kPromptKeys, packed += part_floats) {
            const int count = int(std::min(seen - key, kPromptKeys));
            const int stop = (count + kPanel - 1) / kPanel * kPanel;
            for (int panel = 0; panel < stop; panel += kPanel) {
                for (int row = 0; row < rounded; row += kRows) {
                    inner_products(scaled + row * head_dim, packed + panel * int64_t(head_dim),
                                   head_dim, scores + row * kPromptKeys + panel);
                }
            }
            // Keys of this part that a query sees.
            const auto visible = [&](int row) {
                const int64_t own = block.is_causal ? first + row + 1 - key : count;
                return int(std::min<int64_t>(std::max<int64_t>(own, 0), count));
            };
            for (int row = 0; row < rounded; ++row) {
                float* const own = scores + row * kPromptKeys;
                std::fill(own + visible(row), own + stop, kNoScore);
                factors[row] = continue_softmax<V>(own, stop, largest + row, sums + row);
            }
            const float* const values = values_in(packed, head_dim);
            for (int row = 0; row < rounded; row += kRows) {
                // A weight of 0 would make no number of a value that is none, and is not to be seen.
                const int common = visible(row);
                weigh_all(scores + row * kPromptKeys, factors + row, values, common, row_floats,
                          outputs + row * row_floats);
                for (int own = row + 1; own < row + kRows; ++own) {
                    weigh_row(scores + own * kPromptKeys, values, common, visible(own), row_floats,
                              outputs + own * row_floats);
                }
            }
        }
        for (int row = 0; row < queries; ++row) {
            const float share = 1.0f / sums[row];
            for (int i = 0; i < head_dim; ++i) {
                out[row * block.out_stride + i] = outputs[row * row_floats + i] * share;
            }
            log_sums[row] = largest[row] + std::log(sums[row]);
        }
    }
};

template <class V>
constexpr hillinfer::PromptKernels prompt_kernels_of() {
    return {PromptTiles<V>::packed_floats, PromptTiles<V>::pack, PromptTiles<V>::attend};
}

}  // namespace
