// SPDX-License-Identifier: Apache-2.0
// The score unit: alignment, the two rules and the score code (scoring contract, sections 5 and 7).
#pragma once

#include "shape.h"

namespace hillinfer {

// L: the inner product in log2 units with 8 fraction bits, limited to 24 bits.
inline ap_int<24> align(HeadSum product, ap_int<8> query_exponent, ap_uint<8> token_exponent) {
#pragma HLS INLINE
    constexpr int LIMIT = (1 << 23) - 1;
    const ap_int<10> shift = ap_int<10>(query_exponent) + ap_int<10>(token_exponent) - 6;
    const ap_uint<5> left = shift > 24 ? ap_int<10>(24) : shift;
    const ap_uint<5> right = shift < -24 ? ap_int<10>(24) : ap_int<10>(-shift);
    if (shift >= 0) {
        const ap_int<47> wide = ap_int<47>(product) << left;
        return wide > LIMIT ? ap_int<24>(LIMIT)
                            : (wide < -LIMIT ? ap_int<24>(-LIMIT) : ap_int<24>(wide));
    }
    const ap_int<25> rounding = ap_int<25>(1) << (right - 1);
    return (ap_int<25>(product) + rounding) >> right;
}

// Bits of a non-negative number; 0 for 0.
template <int WIDTH>
inline ap_uint<6> bit_length(ap_uint<WIDTH> value) {
#pragma HLS INLINE
    return WIDTH - value.countLeadingZeros();
}

// Monotone, truncating 16-bit magnitude.
template <int WIDTH>
inline ap_uint<16> mag(ap_uint<WIDTH> value) {
#pragma HLS INLINE
    if (value < 1024) return value;
    const ap_uint<6> bits = bit_length<WIDTH>(value);
    const ap_uint<10> mantissa = value >> (bits - 11);
    return (ap_uint<16>(bits - 10) << 10) | mantissa;
}

template <Rule RULE_OF_UNIT>
struct ScoreRule;

// Sum of 2^(L' - B), by shifts (Mitchell's approximation), 24 fraction bits, saturating.
//
// The contract adds term by term and saturates each time. With M = 2^48 - 1 and no term negative,
//     min(min(a + b, M) + c, M) = min(a + b + c, M):
// where a + b <= M both sides are the same, and where a + b > M both are M, because c >= 0. By
// induction any number of terms can be summed exactly first and limited once, behind one addition
// to the total. With a negative term that would be wrong: the sum could come back from the limit.
template <>
struct ScoreRule<Rule::weight_sum> {
    typedef ap_uint<48> Total;
    // Exact for the terms of one step, eight at most.
    typedef ap_uint<51> StepSum;

    static Total term(ap_int<33> log_weight) {
#pragma HLS INLINE
        const ap_int<25> integer = log_weight >> 8;
        const ap_uint<9> mantissa = 256 + (log_weight & 255);
        if (integer >= 24) return ~Total(0);
        if (integer >= -16) return Total(mantissa) << ap_uint<6>(integer + 16);
        // Nine bits shifted by nine or more are gone.
        if (integer < -24) return 0;
        return mantissa >> ap_uint<4>(-16 - integer);
    }

    static Total add(Total total, StepSum terms) {
#pragma HLS INLINE
        const ap_uint<52> sum = ap_uint<52>(total) + terms;
        return sum.range(51, 48) != 0 ? ~Total(0) : Total(sum);
    }

    static ap_uint<16> code(Total total) {
#pragma HLS INLINE
        return 1 + mag<48>(total);
    }
};

// Sum of the aligned products themselves; exact in 32 bits for up to 64 KV heads.
template <>
struct ScoreRule<Rule::raw_sum> {
    typedef ap_int<32> Total;
    typedef ap_int<32> StepSum;

    static Total term(ap_int<33> aligned) {
#pragma HLS INLINE
        return aligned;
    }

    static Total add(Total total, StepSum terms) {
#pragma HLS INLINE
        return total + terms;
    }

    static ap_uint<16> code(Total total) {
#pragma HLS INLINE
        // -V - 1 is the complement of V.
        const bool negative = total < 0;
        const ap_uint<31> magnitude = negative ? ap_uint<31>(~total) : ap_uint<31>(total);
        const ap_uint<16> code = mag<31>(magnitude);
        return negative ? ap_uint<16>(32767 - code) : ap_uint<16>(32768 + code);
    }
};

typedef ScoreRule<RULE> ScoreUnit;
typedef ScoreUnit::Total Total;
typedef ScoreUnit::StepSum StepSum;

// The totals of a tile's tokens over the heads that share one selected set.
struct TotalWord {
    Total total[TILE_TOKENS];
    bool invalid[TILE_TOKENS];
};

}  // namespace hillinfer
