// SPDX-License-Identifier: Apache-2.0
// Weights of a block's coded tokens with AVX-512, in floats that are exact.
//
// A weight has 24 bits and an exponent, as a float has. So weights, their sums in two windows of 20
// bits, and addends are made by single operations; roundings are those of the contract.
#pragma once
#include <immintrin.h>

#include "coded_weights.h"

namespace {

// 2^(i/16) in two parts and 2^(i/256) - 1, chosen so that rounding coarse + (coarse * fine + rest) gives
// T of each of the 256 places: of the nearest floats to these numbers four places would be off by one.
alignas(64) constexpr float kCoarse[16] = {
    0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f,
    0x1.306fep+0f,  0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
    0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
    0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f,
};
alignas(64) constexpr float kRest[16] = {
    0x0p+0f,          0x1.9f3122p-25f,  -0x1.c15742p-27f, 0x1.ceac48p-25f,
    0x1.4636e2p-25f,  0x1.824684p-25f,  -0x1.593abcp-25f, -0x1.5bd5ecp-27f,
    0x1.9fcef4p-26f,  -0x1.829fdp-25f,  0x1.15506ep-27f,  0x1.51f848p-27f,
    -0x1.a94b14p-26f, -0x1.3d56b2p-27f, -0x1.822dbcp-27f, 0x1.52486cp-27f,
};
alignas(64) constexpr float kFine[16] = {
    0x0p+0f,        0x1.635f4cp-9f, 0x1.63daap-8f,  0x1.0b40a2p-7f,
    0x1.64d1f4p-7f, 0x1.bea172p-7f, 0x1.0c57ap-6f,  0x1.397dccp-6f,
    0x1.66c35p-6f,  0x1.942838p-6f, 0x1.c1aca8p-6f, 0x1.ef50aep-6f,
    0x1.0e8a32p-5f, 0x1.257becp-5f, 0x1.3c7d96p-5f, 0x1.538f36p-5f,
};

// Of at most four query heads.
struct WeightsAvx512 {
    static constexpr int kChunkHeads = 4;
    // Above this exponent of a token floats might not hold its weight.
    static constexpr int kMostExponent = 100;

    // Low and high bytes of a chunk's addends.
    struct Addends {
        alignas(64) uint8_t bytes[kChunkHeads][2][kBlockTokens];
    };

    // What one pass over units leaves for the next one.
    struct Passing {
        // p, a float's bits.
        __m512i placed[kChunkHeads][4];
    };

    // Weighs some query heads of some KV heads, pass by pass for all of them: within one each step waits
    // for the one before.
    static void weigh_units(const CodedUnit* units, int count, int tokens, Addends* addends,
                            CodedWeights (*out)[kChunkHeads]) {
        const auto run = tokens == kBlockTokens ? weigh_some<4, true>
                         : tokens > 48          ? weigh_some<4, false>
                         : tokens > 32          ? weigh_some<3, false>
                         : tokens > 16          ? weigh_some<2, false>
                                                : weigh_some<1, false>;
        run(units, count, tokens, addends, out);
    }

    template <bool kBetween>
    static void powers(const int32_t* relative, int32_t* mantissa) {
        for (int i = 0; i < kBlockTokens; i += 16) {
            const __m512i own = _mm512_loadu_si512(relative + i);
            const __m512i place = _mm512_and_si512(_mm512_srai_epi32(own, 8), _mm512_set1_epi32(255));
            __m512i power = _mm512_i32gather_epi32(place, hillinfer::kPowers, 4);
            if constexpr (kBetween) {
                const __m512i next = _mm512_i32gather_epi32(place, hillinfer::kPowers + 1, 4);
                const __m512i rest = _mm512_and_si512(own, _mm512_set1_epi32(255));
                const __m512i more = _mm512_mullo_epi32(_mm512_sub_epi32(next, power), rest);
                power = _mm512_add_epi32(
                    power, _mm512_srai_epi32(_mm512_add_epi32(more, _mm512_set1_epi32(128)), 8));
            }
            _mm512_storeu_si512(mantissa + i, power);
        }
    }

private:
    static constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    static constexpr int32_t kMantissa = (1 << 23) - 1;

    static bool are_beyond(const uint8_t* exponents) {
        const __m512i own = _mm512_load_si512(exponents);
        const __mmask64 valid =
            _mm512_cmpneq_epi8_mask(own, _mm512_set1_epi8(int8_t(hillinfer::kInvalidExponent)));
        return _mm512_mask_cmpgt_epu8_mask(valid, own, _mm512_set1_epi8(kMostExponent));
    }

    // No key has such exponents.
    __attribute__((noinline)) static void weigh_plainly(const CodedUnit& unit, int tokens,
                                                        Addends& addends, CodedWeights* out) {
        alignas(64) uint16_t own[kChunkHeads][kBlockTokens];
        plain_weigh_coded<WeightsAvx512>(unit, tokens, own, out);
        for (int head = 0; head < unit.heads; ++head) {
            for (int i = 0; i < kBlockTokens; ++i) {
                addends.bytes[head][0][i] = uint8_t(own[head][i]);
                addends.bytes[head][1][i] = uint8_t(own[head][i] >> 8);
            }
        }
    }

    template <int kVectors, bool kWhole>
    static void weigh_some(const CodedUnit* units, int count, int tokens, Addends* addends,
                           CodedWeights (*out)[kChunkHeads]) {
        const uint64_t here = kWhole ? ~uint64_t(0) : (uint64_t(1) << tokens) - 1;
        Passing passing[kMostUnits];
        for (int i = 0; i < count; ++i) {
            find_references<kVectors, kWhole>(units[i], here, out[i]);
        }
        for (int i = 0; i < count; ++i) {
            weigh_unit<kVectors, kWhole>(units[i], here, passing[i], out[i]);
        }
        for (int i = 0; i < count; ++i) {
            for (int head = 0; head < units[i].heads; ++head) {
                write_addends<kVectors>(passing[i].placed[head], out[i][head].top,
                                        addends[i].bytes[head]);
            }
        }
        for (int i = 0; i < count; ++i) {
            if (are_beyond(units[i].exponents)) {
                weigh_plainly(units[i], tokens, addends[i], out[i]);
            }
        }
    }

    template <int kVectors, bool kWhole>
    static void find_references(const CodedUnit& unit, uint64_t here, CodedWeights* out) {
        __m512i found[kChunkHeads];
        for (int head = 0; head < unit.heads; ++head) {
            found[head] = largest_of_some<kVectors, kWhole>(unit.aligned + head * unit.stride, here);
        }
        fill(found, unit.heads);
        const Four references{reference(folded<Largest>(found))};
        for (int head = 0; head < unit.heads; ++head) {
            out[head].reference = references.of[head];
        }
    }

    template <int kVectors, bool kWhole>
    __attribute__((noinline)) static void weigh_unit(const CodedUnit& unit, uint64_t here,
                                                     Passing& passing, CodedWeights* out) {
        __m512i exponent[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            const __m512i own = _mm512_cvtepu8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(unit.exponents + 16 * i)));
            exponent[i] = _mm512_maskz_slli_epi32(
                _mm512_cmpneq_epi32_mask(own, _mm512_set1_epi32(hillinfer::kInvalidExponent)), own, 23);
        }
        __m512i wholes[kChunkHeads], rests[kChunkHeads], found[kChunkHeads];
        for (int head = 0; head < unit.heads; ++head) {
            weigh_head<kVectors, kWhole>(unit.aligned + head * unit.stride, here, out[head].reference,
                                         exponent, passing.placed[head], wholes[head], rests[head],
                                         found[head]);
        }
        fill(wholes, unit.heads);
        fill(rests, unit.heads);
        fill(found, unit.heads);
        const Four whole{folded<Sum>(wholes)}, rest{folded<Sum>(rests)};
        const Four tops{_mm_sub_epi32(_mm_srli_epi32(folded<Largest>(found), 23), _mm_set1_epi32(126))};
        for (int head = 0; head < unit.heads; ++head) {
            out[head].top = tops.of[head];
            // Of 64 tokens below 2^27 each.
            out[head].total = (int64_t(whole.of[head]) << 20) + rest.of[head];
        }
    }

    template <int kVectors, bool kWhole>
    static __m512i largest_of_some(const int32_t* aligned, uint64_t here) {
        __m512i largest = tokens_of<kWhole>(aligned, here, 0);
#pragma GCC unroll 4
        for (int i = 1; i < kVectors; ++i) {
            largest = _mm512_max_epi32(largest, tokens_of<kWhole>(aligned, here, i));
        }
        return largest;
    }

    // p of a head's tokens, the largest of them, and W in units of 2^-20 and of 2^-40.
    template <int kVectors, bool kWhole>
    static void weigh_head(const int32_t* aligned, uint64_t here, int32_t reference,
                           const __m512i* exponent, __m512i* placed, __m512i& wholes, __m512i& rests,
                           __m512i& top) {
        const int32_t far = (reference - 62) * 256;
        const __m512i least = _mm512_set1_epi32(far < -kAlignedLimit ? -kAlignedLimit : far);
        const __m512i most = _mm512_set1_epi32(kAlignedLimit);
        const __m512i base = _mm512_set1_epi32(int32_t(uint32_t(127 - reference) << 23));
        // Floats whose last bit is 2^-20, and 2^-40.
        const __m512 whole_start = _mm512_set1_ps(8.0f), rest_start = _mm512_set1_ps(0x1p-17f);
        __m512 whole = whole_start, rest = rest_start;
        top = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            // What follows is asked for early.
            __builtin_prefetch(aligned + kBlockTokens + 16 * i, 0, 2);
            const __m512i own =
                _mm512_max_epi32(_mm512_min_epi32(tokens_of<kWhole>(aligned, here, i), most), least);
            const __m512i power = _mm512_add_epi32(_mm512_slli_epi32(own, 15), base);
            const __m512i mantissa = _mm512_castps_si512(mantissas(own));
            const __m512i mask = _mm512_set1_epi32(kMantissa);
            // mask ? mantissa : power; nothing where no token is.
            const __m512i weight = _mm512_maskz_ternarylogic_epi32(part<kWhole>(here, i), power, mantissa,
                                                                   mask, 0xD8);
            add_weight(_mm512_castsi512_ps(weight), whole, rest);
            const __mmask16 live = _mm512_cmpge_epi32_mask(
                weight, _mm512_set1_epi32((127 + kLeastPower) << 23));
            placed[i] = _mm512_maskz_add_epi32(live, weight, exponent[i]);
            top = _mm512_max_epi32(top, placed[i]);
        }
        wholes = _mm512_and_si512(_mm512_castps_si512(whole), _mm512_set1_epi32(kMantissa));
        rests = _mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32(kMantissa));
    }

    // Cuts a weight at 2^-40, which leaves nothing of those below.
    static void add_weight(__m512 weight, __m512& whole, __m512& rest) {
        const __m512 more = _mm512_add_round_ps(whole, weight, kDown);
        const __m512 left = _mm512_sub_ps(weight, _mm512_sub_ps(more, whole));
        whole = more;
        rest = _mm512_add_round_ps(rest, left, kDown);
    }

    // T * 2^-23 of the low eight bits.
    static __m512 mantissas(__m512i places) {
        // Only the four lowest bits of a number are looked at.
        const __m512i coarse = _mm512_srli_epi32(places, 4);
        const __m512 whole = _mm512_permutexvar_ps(coarse, _mm512_load_ps(kCoarse));
        const __m512 rest = _mm512_permutexvar_ps(coarse, _mm512_load_ps(kRest));
        const __m512 fine = _mm512_permutexvar_ps(places, _mm512_load_ps(kFine));
        return _mm512_add_ps(whole, _mm512_fmadd_ps(whole, fine, rest));
    }

    template <int kVectors>
    static void write_addends(const __m512i* placed, int top, uint8_t (*bytes)[kBlockTokens]) {
        // Twice a and what is behind the point, cut, above 2^23.
        const __m512 scale = _mm512_castsi512_ps(_mm512_set1_epi32((16 - top + 127) << 23));
        __m512i doubled[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            doubled[i] = i < kVectors ? _mm512_castps_si512(_mm512_fmadd_round_ps(
                                            _mm512_castsi512_ps(placed[i]), scale,
                                            _mm512_set1_ps(0x1p23f), kDown))
                                      : _mm512_setzero_si512();
        }
        const __m512i a = halved(doubled[0], doubled[1]);
        const __m512i b = kVectors > 2 ? halved(doubled[2], doubled[3]) : _mm512_setzero_si512();
        const __m512i low = _mm512_set1_epi16(255);
        store(bytes[0], _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
        store(bytes[1], _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    }

    // Half of the low words, rounded up.
    static __m512i halved(__m512i a, __m512i b) {
        alignas(64) static constexpr uint16_t kEven[32] = {
            0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
            32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
        const __m512i words = _mm512_permutex2var_epi16(a, _mm512_load_si512(kEven), b);
        return _mm512_avg_epu16(words, _mm512_setzero_si512());
    }

    // Octets of tokens come from two vectors by turns.
    static void store(uint8_t* to, __m512i bytes) {
        alignas(64) static constexpr int64_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        _mm512_store_si512(to, _mm512_permutexvar_epi64(_mm512_load_si512(kOrder), bytes));
    }

    // --- One number of each head ---

    struct Four {
        explicit Four(__m128i values) { _mm_store_si128(reinterpret_cast<__m128i*>(of), values); }

        alignas(16) int32_t of[kChunkHeads];
    };

    struct Sum {
        static __m512i of(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
        static __m256i of(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
        static __m128i of(__m128i a, __m128i b) { return _mm_add_epi32(a, b); }
    };

    struct Largest {
        static __m512i of(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
        static __m256i of(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
        static __m128i of(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }
    };

    // Heads that are not there are the first one.
    static void fill(__m512i* of, int heads) {
        for (int head = heads; head < kChunkHeads; ++head) {
            of[head] = of[0];
        }
    }

    // All lanes of four vectors, one number of each.
    template <class Op>
    static __m128i folded(const __m512i* of) {
        const __m512i ab =
            Op::of(_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[0], of[1]));
        const __m512i cd =
            Op::of(_mm512_unpacklo_epi32(of[2], of[3]), _mm512_unpackhi_epi32(of[2], of[3]));
        const __m512i all = Op::of(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i half =
            Op::of(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        return Op::of(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }

    // R of the largest L'.
    static __m128i reference(__m128i largest) {
        const __m128i limited = _mm_max_epi32(_mm_min_epi32(largest, _mm_set1_epi32(kAlignedLimit)),
                                              _mm_set1_epi32(-kAlignedLimit));
        return _mm_srai_epi32(_mm_add_epi32(limited, _mm_set1_epi32(255)), 8);
    }

    // --- A vector's tokens ---

    template <bool kWhole>
    static __mmask16 part(uint64_t here, int vector) {
        return kWhole ? 0xFFFF : __mmask16(here >> (16 * vector));
    }

    template <bool kWhole>
    static __m512i tokens_of(const int32_t* aligned, uint64_t here, int vector) {
        return kWhole ? _mm512_loadu_si512(aligned + 16 * vector)
                      : _mm512_mask_loadu_epi32(_mm512_set1_epi32(kNoToken), part<false>(here, vector),
                                                aligned + 16 * vector);
    }
};

}  // namespace
