// SPDX-License-Identifier: Apache-2.0
// Scores of a group where no number is large: the contract's results in fewer steps.
//
// No limit of sections 5 and 7 is reached when 2^nu moves no product past 2^23 - 1 and no weight is
// near 2^31. Real keys and queries are like that almost always; `tuples` says where they are not,
// and the caller then goes the long way.
#pragma once
#include "contract.h"
#include "shape.h"

namespace {

// P = (U << shift) - bias, U being what `Products` makes for every token of a head.
struct Correction {
    int shift;
    int32_t bias;
};

// The largest nu that moves no product of a shape past its limit.
inline int32_t largest_nu(const hillinfer::Shape& shape) {
    // INT2: |2 * kappa + 1| <= 3.
    const int32_t code = shape.code_bits == 8 ? 128 : shape.code_bits == 4 ? 8 : 3;
    int32_t nu = 0;
    while ((int64_t(127) * code * shape.padded_dim) << (nu + 1) <= kProductMax) {
        ++nu;
    }
    return nu;
}

// The first Z that is too large for a sum of `rows` weights in 31 bits.
inline int32_t near_limit(int rows) {
    const int bits = rows > 1 ? 32 - __builtin_clz(uint32_t(rows - 1)) : 0;
    return (7 - bits) << 8;
}

inline void mark_invalid(const uint8_t* __restrict exponents, int32_t* __restrict valid) {
    for (int i = 0; i < hillinfer::kGroupTokens; ++i) {
        valid[i] &= exponents[i] == hillinfer::kInvalidExponent ? 0 : -1;
    }
}

// Exponents of a group's tokens in one KV head, 0 for an invalid one; returns the largest.
inline int32_t near_exponents(const uint8_t* __restrict exponents, int32_t* __restrict out) {
    int32_t largest = 0;
    for (int i = 0; i < hillinfer::kGroupTokens; ++i) {
        const int32_t own =
            exponents[i] == hillinfer::kInvalidExponent ? 0 : int32_t(exponents[i]);
        largest = own > largest ? own : largest;
        out[i] = own;
    }
    return largest;
}

// One head of a group on its way from products to L'.
class NearRow {
public:
    // `offset` is added to L. Where twice of it does not fit, as of head 0 with the addends of many
    // others, no token is near and the long way is gone.
    NearRow(Correction correction, int32_t query_exponent, int32_t largest_nu, int32_t offset)
        : shift_(correction.shift + largest_nu + 1),
          bias_(correction.bias << (largest_nu + 1)),
          most_(offset > -kLargestOffset && offset < kLargestOffset
                    ? largest_nu + 6 - query_exponent
                    : -1),
          rounding_(static_cast<int32_t>(2u * static_cast<uint32_t>(offset) + 1u)) {}

    // Whether no token of an exponent up to this one moves a product past the limit.
    bool fits(int32_t largest_exponent) const { return largest_exponent <= most_; }

    // L is P * 2^nu to the nearest, halves up. P, moved left as far as the largest nu moves it and
    // one further, only moves right from there; the last step rounds and adds the offset.
    int32_t log_weight(int32_t product, int32_t exponent) const {
        const int32_t right = most_ - exponent;
        const int32_t twice = ((product << shift_) - bias_) >> (right > 31 ? 31 : right);
        return (twice + rounding_) >> 1;
    }

    int32_t shift() const { return shift_; }
    int32_t bias() const { return bias_; }
    int32_t most() const { return most_; }
    int32_t rounding() const { return rounding_; }

private:
    static constexpr int32_t kLargestOffset = 1 << 29;

    int32_t shift_;
    int32_t bias_;
    int32_t most_;
    int32_t rounding_;  // Twice the offset and what rounds.
};

inline void near_values(const int32_t* __restrict products, const int32_t* __restrict exponents,
                        NearRow row, int32_t* __restrict out) {
    for (int i = 0; i < hillinfer::kGroupTokens; ++i) {
        out[i] = row.log_weight(products[i], exponents[i]);
    }
}

inline bool add_near_values(const uint8_t* stored, const int32_t* __restrict products,
                            const NearRow* rows, int count, int32_t* __restrict sums,
                            int32_t* valid) {
    alignas(64) int32_t exponents[hillinfer::kGroupTokens];
    const int32_t largest = near_exponents(stored, exponents);
    mark_invalid(stored, valid);
    for (int row = 0; row < count; ++row, products += hillinfer::kGroupTokens) {
        const NearRow own = rows[row];
        if (!own.fits(largest)) {
            return false;
        }
        for (int i = 0; i < hillinfer::kGroupTokens; ++i) {
            sums[i] += own.log_weight(products[i], exponents[i]);
        }
    }
    return true;
}

// `row` yields Z here. Returns the largest; from `limit` on the sums are of no use.
inline int32_t add_row_weights(const int32_t* __restrict products,
                               const int32_t* __restrict exponents, NearRow row, int32_t limit,
                               int32_t* __restrict sums) {
    int32_t largest = INT32_MIN;
    for (int i = 0; i < hillinfer::kGroupTokens; ++i) {
        const int32_t z = row.log_weight(products[i], exponents[i]);
        largest = z > largest ? z : largest;
        // The bits of a float, as in `weight`; its conversion drops the fraction.
        const int32_t bits = (clamp_int(z, -26 * 256, limit) + ((24 + 127) << 8)) << 15;
        sums[i] += int32_t(float_of_bits(bits));
    }
    return largest;
}

struct NearWeights {
    // L' of some of a group's tokens, a bit for each, one behind the other.
    static void some_values(const int32_t* products, const int32_t* exponents, NearRow row,
                            uint64_t tokens, int32_t* out) {
        for (; tokens; tokens &= tokens - 1) {
            const int token = __builtin_ctzll(tokens);
            *out++ = row.log_weight(products[token], exponents[token]);
        }
    }

    // What a KV head adds to the weights of its tokens, a row after the other. False where a number is
    // large: then the sums are of no use.
    static bool add_near_weights(const uint8_t* stored, const int32_t* products,
                                 const NearRow* rows, int count, int32_t limit, int32_t* sums,
                                 int32_t* valid) {
        alignas(64) int32_t exponents[hillinfer::kGroupTokens];
        const int32_t largest = near_exponents(stored, exponents);
        mark_invalid(stored, valid);
        bool near = true;
        for (int i = 0; i < count && near; ++i) {
            near = rows[i].fits(largest) &&
                   add_row_weights(products + i * hillinfer::kGroupTokens, exponents, rows[i],
                                   limit, sums) < limit;
        }
        return near;
    }
};

}  // namespace
