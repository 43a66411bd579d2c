// SPDX-License-Identifier: Apache-2.0
// Weights of a block's tokens, relative to a power of two (scoring contract, section 16).
//
// Everything has internal linkage: each instruction set's file compiles its own copy. Loops are
// such as compilers make vectors of.
#pragma once
#include <cstring>

#include "coded.h"
#include "contract.h"
#include "exact_floats.h"

namespace {

using hillinfer::kBlockTokens;
using hillinfer::kLeastPower;

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Float of 2^power: also below the normal numbers, exact from -149 on.
inline float power_of_two(int power) {
    return power < -126 ? __builtin_ldexpf(1.0f, power) : float_of_bits((power + 127) << 23);
}

inline float unit_total(int64_t total) { return float(total) * power_of_two(kLeastPower); }

// R of the largest X.
inline int32_t reference_of(int32_t largest) { return int32_t(-(-int64_t(largest) >> 16)); }

// Weights of a block, P * 2^(I - 23). What lies behind the last token weighs nothing.
struct BlockWeights {
    int32_t reference;
    int64_t total;
    alignas(64) int32_t power[kBlockTokens];     // I; below kLeastPower the weight is 0.
    alignas(64) int32_t mantissa[kBlockTokens];  // P.
};

inline int32_t largest_of(const int32_t* fixed, int64_t count) {
    int32_t largest = fixed[0];
    for (int64_t i = 1; i < count; ++i) {
        largest = fixed[i] > largest ? fixed[i] : largest;
    }
    return largest;
}

// `V::powers` looks the table up; of coded tokens f is a multiple of 256, so nothing lies between.
template <class V, bool kBetween>
inline void weigh(const int32_t* __restrict fixed, int tokens, BlockWeights& __restrict out) {
    const int32_t reference = reference_of(largest_of(fixed, kBlockTokens));
    // Far below every weight, so that the distance has 32 bits.
    const int64_t far = (int64_t(reference) - 62) * 65536;
    const int32_t least = far < INT32_MIN ? INT32_MIN : int32_t(far);
    alignas(64) int32_t relative[kBlockTokens];
    for (int i = 0; i < kBlockTokens; ++i) {
        const int32_t limited = fixed[i] > least ? fixed[i] : least;
        relative[i] = int32_t(uint32_t(limited) - (uint32_t(reference) << 16));
        out.power[i] = relative[i] >> 16;
    }
    for (int i = tokens; i < kBlockTokens; ++i) {
        out.power[i] = -62;
    }
    V::template powers<kBetween>(relative, out.mantissa);
    uint64_t total = 0;
    for (int i = 0; i < kBlockTokens; ++i) {
        // Below 2^-40 of the reference nothing is left of 41 bits.
        total += (uint64_t(uint32_t(out.mantissa[i])) << 17) >> uint32_t(-out.power[i]);
    }
    out.reference = reference;
    out.total = int64_t(total);
}

// P of f, from a table.
template <bool kBetween>
inline int32_t mantissa_of(int32_t relative) {
    const int32_t place = relative >> 8 & 255;
    const int32_t power = hillinfer::kPowers[place];
    if (!kBetween) {
        return power;
    }
    return power + (((hillinfer::kPowers[place + 1] - power) * (relative & 255) + 128) >> 8);
}

template <bool kBetween>
inline void plain_powers(const int32_t* __restrict relative, int32_t* __restrict mantissa) {
    for (int i = 0; i < kBlockTokens; ++i) {
        mantissa[i] = mantissa_of<kBetween>(relative[i]);
    }
}

// a of a block's tokens, and U: weights times powers of the tokens' exponents, 15 bits of the largest.
inline int addends_of(const BlockWeights& weights, const uint8_t* __restrict exponents,
                      uint16_t* __restrict addends) {
    alignas(64) int32_t place[kBlockTokens];
    int32_t top = kLeastPower;
    for (int i = 0; i < kBlockTokens; ++i) {
        // What is invalid only has to stay in range.
        const int32_t exponent = exponents[i] == hillinfer::kInvalidExponent ? 0 : exponents[i];
        place[i] = weights.power[i] >= kLeastPower ? weights.power[i] + exponent : kLeastPower - 1;
        top = place[i] > top ? place[i] : top;
    }
    ++top;
    for (int i = 0; i < kBlockTokens; ++i) {
        const int32_t wanted = top - place[i] + 8;
        // From 25 on nothing is left of 24 bits and a half.
        const int32_t shift = weights.power[i] < kLeastPower || wanted > 26 ? 26 : wanted;
        addends[i] = uint16_t((weights.mantissa[i] + (1 << (shift - 1))) >> shift);
    }
    return top;
}

constexpr int32_t kAlignedLimit = (1 << 23) - 1;
// Below every X: a token that is not there.
constexpr int32_t kNoToken = INT32_MIN;

inline int32_t fixed_aligned(int32_t aligned) {
    aligned = aligned > kAlignedLimit ? kAlignedLimit : aligned;
    return (aligned < -kAlignedLimit ? -kAlignedLimit : aligned) * 256;
}

// X of a block's tokens, and of none behind them.
template <class Fix>
inline void take(const int32_t* __restrict from, int tokens, int32_t* __restrict block, Fix fix) {
    for (int i = 0; i < tokens; ++i) {
        block[i] = fix(from[i]);
    }
    for (int i = tokens; i < kBlockTokens; ++i) {
        block[i] = kNoToken;
    }
}

// R, W and U of a block of coded tokens.
struct CodedWeights {
    int32_t reference;
    int32_t top;
    int64_t total;
};

// Some query heads of one KV head, and what weighs a block's tokens in them.
struct CodedUnit {
    const int32_t* aligned;    // L' of the first one; those of the next one lie
    int64_t stride;            // so much further.
    const uint8_t* exponents;  // Of 64 tokens, 0 behind the last one.
    int head;                  // The KV head, and the first of its query heads
    int first;
    int heads;  // of so many.
};

// Units that are weighed together.
constexpr int kMostUnits = 8;

// The same of a unit, and its addends, with what compilers make of loops.
template <class V>
inline void plain_weigh_coded(const CodedUnit& unit, int tokens, uint16_t (*addends)[kBlockTokens],
                              CodedWeights* out) {
    for (int head = 0; head < unit.heads; ++head) {
        alignas(64) int32_t block[kBlockTokens];
        take(unit.aligned + head * unit.stride, tokens, block, fixed_aligned);
        BlockWeights weights;
        weigh<V, false>(block, tokens, weights);
        const int top = addends_of(weights, unit.exponents, addends[head]);
        out[head] = {weights.reference, top, weights.total};
    }
}

// Of several units.
template <class V>
inline void plain_weigh_units(const CodedUnit* units, int count, int tokens,
                              typename V::Addends* addends, CodedWeights (*out)[V::kChunkHeads]) {
    for (int i = 0; i < count; ++i) {
        plain_weigh_coded<V>(units[i], tokens, addends[i].of, out[i]);
    }
}

}  // namespace
