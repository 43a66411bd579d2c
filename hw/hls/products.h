// SPDX-License-Identifier: Apache-2.0
// Inner products over one slice of 16 channels, in DSP blocks or as bit planes in LUTs.
//
// All results are exact: integer sums have no order, so the hardware may build any adder tree.
#pragma once

#include "shape.h"

namespace hillinfer {

// Two sums of eight products from eight multipliers: the two left operands share one 27-bit port
// of the DSP block, 18 bits apart. Eight products of |a| <= 128 and |b| <= 127 stay below 2^17, so
// the lower field holds its whole sum and what it borrows from the upper one can be put back.
inline void packed_products(const ap_int<8> low[8], const ap_int<8> high[8], const ap_int<8> b[8],
                            SliceSum &low_sum, SliceSum &high_sum) {
#pragma HLS INLINE
    ap_int<38> fields = 0;
    for (int j = 0; j < 8; ++j) {
#pragma HLS UNROLL
        const ap_int<27> pair = ap_int<27>(low[j]) + (ap_int<27>(high[j]) << 18);
        const ap_int<35> product = pair * b[j];
#pragma HLS BIND_OP variable=product op=mul impl=dsp
        fields += product;
    }
    const ap_int<18> low_field = fields.range(17, 0);
    const ap_int<20> high_field = (fields - low_field) >> 18;
    low_sum += low_field;
    high_sum += high_field;
}

// One slice of `TOKENS` tokens against the query heads of their KV head.
template <ProductStyle STYLE, int TOKENS>
struct SliceProducts;

// Packed products: two tokens against one query value, or, where there is one token, two query
// heads against one key value. A last one without a partner takes a multiplier of its own.
template <int TOKENS>
struct SliceProducts<ProductStyle::dsp, TOKENS> {
    static void sum(const KeyCode keys[TOKENS][SLICE_CHANNELS], const QueryWord &query,
                    SliceSum sums[TOKENS][GROUP_HEADS]) {
#pragma HLS INLINE
        for (int i = 0; i < TOKENS; i += 2) {
#pragma HLS UNROLL
            for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
                sums[i][r] = 0;
                sums[i + 1][r] = 0;
                for (int half = 0; half < SLICE_CHANNELS; half += 8) {
#pragma HLS UNROLL
                    ap_int<8> low[8];
                    ap_int<8> high[8];
                    for (int j = 0; j < 8; ++j) {
#pragma HLS UNROLL
                        low[j] = keys[i][half + j];
                        high[j] = keys[i + 1][half + j];
                    }
                    packed_products(low, high, &query.code[r][half], sums[i][r], sums[i + 1][r]);
                }
            }
        }
    }
};

template <>
struct SliceProducts<ProductStyle::dsp, 1> {
    static void sum(const KeyCode keys[1][SLICE_CHANNELS], const QueryWord &query,
                    SliceSum sums[1][GROUP_HEADS]) {
#pragma HLS INLINE
        for (int r = 0; r < GROUP_HEADS; r += 2) {
#pragma HLS UNROLL
            // In range even where there is no partner.
            const int partner = smaller(r + 1, GROUP_HEADS - 1);
            SliceSum first = 0;
            SliceSum second = 0;
            for (int half = 0; half < SLICE_CHANNELS; half += 8) {
#pragma HLS UNROLL
                ap_int<8> low[8];
                ap_int<8> high[8];
                ap_int<8> key[8];
                for (int j = 0; j < 8; ++j) {
#pragma HLS UNROLL
                    low[j] = query.code[r][half + j];
                    // The constant 0 of a missing partner folds the packing away.
                    high[j] = r + 1 < GROUP_HEADS ? query.code[partner][half + j]
                                                  : QueryCode(0);
                    key[j] = keys[0][half + j];
                }
                packed_products(low, high, key, first, second);
            }
            sums[0][r] = first;
            if (r + 1 < GROUP_HEADS) sums[0][partner] = second;
        }
    }
};

// Bit planes: two neighbouring bits of a plane choose one of {0, qa, qb, qa + qb}, which all tokens
// and planes share; the last plane of a two's complement code counts negatively.
template <int TOKENS>
struct SliceProducts<ProductStyle::lut, TOKENS> {
    static void sum(const KeyCode keys[TOKENS][SLICE_CHANNELS], const QueryWord &query,
                    SliceSum sums[TOKENS][GROUP_HEADS]) {
#pragma HLS INLINE
        for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
            ap_int<9> subset_sums[SLICE_CHANNELS / 2][4];
#pragma HLS ARRAY_PARTITION variable=subset_sums complete dim=0
            for (int j = 0; j < SLICE_CHANNELS / 2; ++j) {
#pragma HLS UNROLL
                const QueryCode a = query.code[r][2 * j];
                const QueryCode b = query.code[r][2 * j + 1];
                subset_sums[j][0] = 0;
                subset_sums[j][1] = a;
                subset_sums[j][2] = b;
                subset_sums[j][3] = a + b;
            }
            for (int i = 0; i < TOKENS; ++i) {
#pragma HLS UNROLL
                SliceSum sum = 0;
                for (int plane = 0; plane < CODE_BITS; ++plane) {
#pragma HLS UNROLL
                    ap_int<12> plane_sum = 0;
                    for (int j = 0; j < SLICE_CHANNELS / 2; ++j) {
#pragma HLS UNROLL
                        const int bits =
                            int(keys[i][2 * j][plane]) + 2 * int(keys[i][2 * j + 1][plane]);
                        plane_sum += subset_sums[j][bits];
                    }
                    const SliceSum weighted = SliceSum(plane_sum) << plane;
                    sum = plane == CODE_BITS - 1 ? SliceSum(sum - weighted)
                                                 : SliceSum(sum + weighted);
                }
                sums[i][r] = sum;
            }
        }
    }
};

// Sum of q · k over a slice. An INT2 code κ means 2κ + 1, so P = 2 · sum(q · κ) + sum(q).
template <int TOKENS>
inline void slice_products(const KeyCode keys[TOKENS][SLICE_CHANNELS], const QueryWord &query,
                           SliceSum sums[TOKENS][GROUP_HEADS]) {
#pragma HLS INLINE
    SliceProducts<PRODUCT_STYLE, TOKENS>::sum(keys, query, sums);
    if (CODE_BITS == 2) {
        for (int r = 0; r < GROUP_HEADS; ++r) {
#pragma HLS UNROLL
            ap_int<12> query_sum = 0;
            for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                query_sum += query.code[r][j];
            }
            for (int i = 0; i < TOKENS; ++i) {
#pragma HLS UNROLL
                sums[i][r] = 2 * sums[i][r] + query_sum;
            }
        }
    }
}

}  // namespace hillinfer
