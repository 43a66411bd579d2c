// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens with AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products: those of four tokens. Addends
// have 15 bits and are taken byte by byte; codes become 1 to 15, and what is too much is subtracted.
#include <immintrin.h>

#include "coded_kernels.h"
#include "coded_rows_avx512.h"

namespace {

// gcc must not take sums apart and put them together in another order.
inline void add_products(__m512i& sum, __m512i addends, __m512i codes) {
    sum = _mm512_dpbusd_epi32(sum, addends, codes);
    asm("" : "+v"(sum));
}

inline __m512i repeated(const uint8_t* quad) {
    int32_t word;
    std::memcpy(&word, quad, sizeof word);
    return _mm512_set1_epi32(word);
}

// 2^(23 + i/16) and 2^(i/256).
alignas(64) constexpr double kCoarse[16] = {
    0x1.0000000000000p+23, 0x1.0b5586cf9890fp+23,
    0x1.172b83c7d517bp+23, 0x1.2387a6e756238p+23,
    0x1.306fe0a31b715p+23, 0x1.3dea64c123422p+23,
    0x1.4bfdad5362a27p+23, 0x1.5ab07dd485429p+23,
    0x1.6a09e667f3bcdp+23, 0x1.7a11473eb0187p+23,
    0x1.8ace5422aa0dbp+23, 0x1.9c49182a3f090p+23,
    0x1.ae89f995ad3adp+23, 0x1.c199bdd85529cp+23,
    0x1.d5818dcfba487p+23, 0x1.ea4afa2a490dap+23,
};
alignas(64) constexpr double kFine[16] = {
    0x1.0000000000000p+0, 0x1.00b1afa5abcbfp+0,
    0x1.0163da9fb3335p+0, 0x1.02168143b0281p+0,
    0x1.02c9a3e778061p+0, 0x1.037d42e11bbccp+0,
    0x1.04315e86e7f85p+0, 0x1.04e5f72f654b1p+0,
    0x1.059b0d3158574p+0, 0x1.0650a0e3c1f89p+0,
    0x1.0706b29ddf6dep+0, 0x1.07bd42b72a836p+0,
    0x1.0874518759bc8p+0, 0x1.092bdf66607e0p+0,
    0x1.09e3ecac6f383p+0, 0x1.0a9c79b1f3919p+0,
};

struct Avx512 : RowsAvx512 {
    static constexpr int kChunkHeads = 4;
    static constexpr int kQuads = kBlockTokens / 4;
    static constexpr int kMostVectors = kMostCodedChannels / 128;

    // Where a head has two blocks of 16 bytes, a vector has two quads of tokens, else one quad and up
    // to four blocks. Four vectors have the bytes of channels 0 to 3, 4 to 7, and so on, of each
    // block, those of four tokens beside each other.
    struct Arranged {
        __m512i codes[kMostVectors][4][kQuads];
    };

    // Sums lie as their registers have them: by vectors, quarters and halves of 32 channels, and then
    // by blocks.
    static int width(int blocks) { return blocks == 2 ? 64 : (blocks + 3) / 4 * 128; }

    static int place(int channel, int blocks) {
        const int block = channel / 32;
        const int half = channel / 16 % 2;
        const int quarter = channel / 4 % 4;
        const int at_once = blocks == 2 ? 2 : 4;
        return (((block / at_once * 4 + quarter) * 2 + half) * at_once + block % at_once) * 4 +
               channel % 4;
    }

    __attribute__((noinline)) static void arrange(const uint64_t* rows, size_t start, int blocks,
                                                  int tokens, Arranged& out) {
        if (blocks == 2) {
            for (int octet = 0; octet < tokens / 8; ++octet) {
                const uint64_t* own = rows + octet * 8;
                __m512i of[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    of[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_half(at(own[i]) + start)),
                                               load_half(at(own[4 + i]) + start), 1);
                }
                transpose(of, &out.codes[0][0][octet]);
            }
            return;
        }
        for (int vector = 0; vector * 4 < blocks; ++vector) {
            const int left = blocks - 4 * vector;
            const __mmask16 here = left >= 4 ? 0xFFFF : __mmask16((1u << (4 * left)) - 1);
            for (int quad = 0; quad < tokens / 4; ++quad) {
                __m512i of[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    of[i] = _mm512_maskz_loadu_epi32(here, at(rows[quad * 4 + i]) + start + vector * 64);
                }
                transpose(of, &out.codes[vector][0][quad]);
            }
        }
    }

    // Low and high bytes of a chunk's addends, and eight times their sums.
    struct Addends {
        alignas(64) uint8_t bytes[kChunkHeads][2][kBlockTokens];
        int32_t excess[kChunkHeads];
    };

    static void sums(const Arranged& arranged, int blocks, int tokens, const Addends& addends, int heads,
                     Ahead& ahead, int32_t (*out)[kMostCodedChannels]) {
        const auto run = blocks == 2 ? sums_of<true>(heads) : sums_of<false>(heads);
        run(arranged, blocks, tokens, addends, ahead, out);
    }

    static void weigh_coded(const int32_t* aligned, int64_t stride, int heads, int tokens,
                            const uint8_t* exponents, Addends& addends, CodedWeights* out) {
        const auto weigh = tokens > 48   ? weigh_some<4>
                           : tokens > 32 ? weigh_some<3>
                           : tokens > 16 ? weigh_some<2>
                                         : weigh_some<1>;
        weigh(aligned, stride, heads, tokens, exponents, addends, out);
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
    // As `plain_weigh_coded`, step by step for all heads: within one each step waits for the one before.
    // A function of its own, as `arrange` is: inside the caller there are not registers enough.
    template <int kVectors>
    __attribute__((noinline)) static void weigh_some(const int32_t* aligned, int64_t stride, int heads,
                                                     int tokens, const uint8_t* exponents,
                                                     Addends& addends, CodedWeights* out) {
        const uint64_t here = tokens == kBlockTokens ? ~uint64_t(0) : (uint64_t(1) << tokens) - 1;
        __m512i fixed[kChunkHeads][kVectors];
        for (int head = 0; head < heads; ++head) {
            fix<kVectors>(aligned + head * stride, here, fixed[head]);
        }
        for (int head = 0; head < heads; ++head) {
            __m512i largest = fixed[head][0];
#pragma GCC unroll 4
            for (int i = 1; i < kVectors; ++i) {
                largest = _mm512_max_epi32(largest, fixed[head][i]);
            }
            out[head].reference = reference_of(_mm512_reduce_max_epi32(largest));
        }
        __m512i exponent[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            const __m512i own = _mm512_cvtepu8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(exponents + 16 * i)));
            exponent[i] = _mm512_maskz_mov_epi32(
                _mm512_cmpneq_epi32_mask(own, _mm512_set1_epi32(hillinfer::kInvalidExponent)), own);
        }
        __m512i mantissa[kChunkHeads][kVectors], place[kChunkHeads][kVectors];
        __m512i wholes[kChunkHeads], rests[kChunkHeads], tops[kChunkHeads];
        for (int head = 0; head < heads; ++head) {
            const int64_t reference = out[head].reference;
            const int64_t far = (reference - 62) * 65536;
            const __m512i least = _mm512_set1_epi32(far < INT32_MIN ? INT32_MIN : int32_t(far));
            const __m512i base = _mm512_set1_epi32(int32_t(uint32_t(reference) << 16));
            __m512i whole = _mm512_setzero_si512();
            __m512i rest = _mm512_setzero_si512();
            __m512i top = _mm512_set1_epi32(kLeastPower);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                const __m512i relative = _mm512_sub_epi32(_mm512_max_epi32(fixed[head][i], least), base);
                const __m512i power = _mm512_srai_epi32(relative, 16);
                const __mmask16 live = _mm512_mask_cmpge_epi32_mask(
                    part(here, i), power, _mm512_set1_epi32(kLeastPower));
                const __m512i own =
                    _mm512_maskz_mov_epi32(live, whole_powers(_mm512_srai_epi32(relative, 8)));
                const __m512i down = _mm512_sub_epi32(_mm512_setzero_si512(), power);
                whole = _mm512_add_epi32(whole, _mm512_srlv_epi32(own, down));
                rest = _mm512_add_epi32(rest, rest_of_share(own, down));
                mantissa[head][i] = own;
                place[head][i] = _mm512_add_epi32(power, exponent[i]);
                top = _mm512_mask_max_epi32(top, live, top, place[head][i]);
            }
            wholes[head] = whole;
            rests[head] = rest;
            tops[head] = top;
        }
        for (int head = 0; head < heads; ++head) {
            out[head].top = _mm512_reduce_max_epi32(tops[head]) + 1;
            // Of 64 tokens below 2^30, and below 2^23.
            out[head].total = (int64_t(_mm512_reduce_add_epi32(wholes[head])) << 17) +
                              _mm512_reduce_add_epi32(rests[head]);
        }
        const __m512i one = _mm512_set1_epi32(1);
        for (int head = 0; head < heads; ++head) {
            const __m512i from = _mm512_set1_epi32(out[head].top + 8);
            __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                // From 25 on nothing is left of 24 bits and a half, nor of a weight of 0.
                const __m512i shift = _mm512_min_epi32(_mm512_sub_epi32(from, place[head][i]),
                                                       _mm512_set1_epi32(26));
                const __m512i half = _mm512_sllv_epi32(one, _mm512_sub_epi32(shift, one));
                const __m512i own =
                    _mm512_srlv_epi32(_mm512_add_epi32(mantissa[head][i], half), shift);
                sum = _mm512_add_epi32(sum, own);
                store(addends.bytes[head][0] + 16 * i, _mm512_cvtepi32_epi8(own));
                store(addends.bytes[head][1] + 16 * i,
                      _mm512_cvtepi32_epi8(_mm512_srli_epi32(own, 8)));
            }
            addends.excess[head] = 8 * _mm512_reduce_add_epi32(sum);
        }
    }

    // X of a head's tokens, and of none behind them.
    template <int kVectors>
    static void fix(const int32_t* aligned, uint64_t here, __m512i* fixed) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            // What follows is asked for early.
            __builtin_prefetch(aligned + kBlockTokens + 16 * i, 0, 2);
            const __m512i own = _mm512_maskz_loadu_epi32(part(here, i), aligned + 16 * i);
            const __m512i limited =
                _mm512_max_epi32(_mm512_min_epi32(own, _mm512_set1_epi32(kAlignedLimit)),
                                 _mm512_set1_epi32(-kAlignedLimit));
            fixed[i] = _mm512_mask_slli_epi32(_mm512_set1_epi32(kNoToken), part(here, i), limited, 8);
        }
    }

    static __mmask16 part(uint64_t tokens, int vector) { return __mmask16(tokens >> (16 * vector)); }

    static void store(uint8_t* to, __m128i bytes) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to), bytes);
    }

    // The low 17 bits of (P << 17) >> -I; the others are P >> -I. Shifts by 32 and more, and by less
    // than nothing, give 0.
    static __m512i rest_of_share(__m512i mantissa, __m512i down) {
        const __m512i seventeen = _mm512_set1_epi32(17);
        const __m512i up = _mm512_sllv_epi32(mantissa, _mm512_sub_epi32(seventeen, down));
        const __m512i low = _mm512_srlv_epi32(mantissa, _mm512_sub_epi32(down, seventeen));
        // (up | low) & mask.
        return _mm512_ternarylogic_epi32(up, low, _mm512_set1_epi32((1 << 17) - 1), 0xA8);
    }

    // T of the low eight bits, a product of powers by four bits each: rounded it is the table's number
    // for each of the 256.
    static __m512i whole_powers(__m512i places) {
        const __m256i low = half_powers(_mm512_castsi512_si256(places));
        const __m256i high = half_powers(_mm512_extracti64x4_epi64(places, 1));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }

    static __m256i half_powers(__m256i places) {
        // Only the four lowest bits of a number are looked at.
        const __m512i fine = _mm512_cvtepu32_epi64(places);
        const __m512i coarse = _mm512_srli_epi64(fine, 4);
        const __m512d a = _mm512_permutex2var_pd(_mm512_load_pd(kCoarse), coarse,
                                                 _mm512_load_pd(kCoarse + 8));
        const __m512d b = _mm512_permutex2var_pd(_mm512_load_pd(kFine), fine, _mm512_load_pd(kFine + 8));
        return _mm512_cvtpd_epi32(_mm512_mul_pd(a, b));
    }

    using Sums = void (*)(const Arranged&, int, int, const Addends&, Ahead&,
                          int32_t (*)[kMostCodedChannels]);

    static __m256i load_half(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }

    // Bytes of four tokens beside each other; vectors of the four quarters of 16 bytes are kQuads apart.
    static void transpose(const __m512i* of, __m512i* to) {
        const __m512i low_even = _mm512_unpacklo_epi8(of[0], of[1]);
        const __m512i low_odd = _mm512_unpacklo_epi8(of[2], of[3]);
        const __m512i high_even = _mm512_unpackhi_epi8(of[0], of[1]);
        const __m512i high_odd = _mm512_unpackhi_epi8(of[2], of[3]);
        // Nibbles 0 to 15 instead of -8 to 7.
        const __m512i top = _mm512_set1_epi8(int8_t(0x88));
        to[0] = _mm512_xor_si512(_mm512_unpacklo_epi16(low_even, low_odd), top);
        to[kQuads] = _mm512_xor_si512(_mm512_unpackhi_epi16(low_even, low_odd), top);
        to[2 * kQuads] = _mm512_xor_si512(_mm512_unpacklo_epi16(high_even, high_odd), top);
        to[3 * kQuads] = _mm512_xor_si512(_mm512_unpackhi_epi16(high_even, high_odd), top);
    }

    template <bool kTwoBlocks>
    static Sums sums_of(int heads) {
        switch (heads) {
            case 1:
                return sums_of_heads<kTwoBlocks, 1>;
            case 2:
                return sums_of_heads<kTwoBlocks, 2>;
            case 3:
                return sums_of_heads<kTwoBlocks, 3>;
            default:
                return sums_of_heads<kTwoBlocks, 4>;
        }
    }

    template <bool kTwoBlocks, int kHeads>
    static void sums_of_heads(const Arranged& arranged, int blocks, int tokens, const Addends& addends,
                              Ahead& ahead, int32_t (*out)[kMostCodedChannels]) {
        const __m512i nibble = _mm512_set1_epi8(0x0F);
        const int steps = tokens / (kTwoBlocks ? 8 : 4);
        Ahead own_ahead = ahead;
        for (int vector = 0; vector * 4 < blocks; ++vector) {
            for (int quarter = 0; quarter < 4; ++quarter) {
                // Of low and high nibbles, by low and high bytes.
                __m512i sums[kHeads][2][2];
#pragma GCC unroll 4
                for (auto& own : sums) {
                    own[0][0] = own[0][1] = own[1][0] = own[1][1] = _mm512_setzero_si512();
                }
                const __m512i* const codes = arranged.codes[vector][quarter];
                for (int step = 0; step < steps; ++step) {
                    own_ahead.touch();
                    const __m512i low = _mm512_and_si512(codes[step], nibble);
                    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes[step], 4), nibble);
#pragma GCC unroll 4
                    for (int head = 0; head < kHeads; ++head) {
#pragma GCC unroll 2
                        for (int part = 0; part < 2; ++part) {
                            const uint8_t* bytes = addends.bytes[head][part];
                            __m512i own;
                            if constexpr (kTwoBlocks) {
                                int32_t second;
                                std::memcpy(&second, bytes + 8 * step + 4, sizeof second);
                                own = _mm512_mask_set1_epi32(repeated(bytes + 8 * step), 0xFF00, second);
                            } else {
                                own = repeated(bytes + 4 * step);
                            }
                            add_products(sums[head][0][part], own, low);
                            add_products(sums[head][1][part], own, high);
                        }
                    }
                }
#pragma GCC unroll 4
                for (int head = 0; head < kHeads; ++head) {
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        const __m512i excess = _mm512_set1_epi32(addends.excess[head]);
                        const __m512i all = _mm512_add_epi32(
                            sums[head][half][0], _mm512_slli_epi32(sums[head][half][1], 8));
                        int32_t* const to =
                            out[head] + ((vector * 4 + quarter) * 2 + half) * (kTwoBlocks ? 8 : 16);
                        if constexpr (kTwoBlocks) {
                            const __m256i both = _mm256_add_epi32(
                                _mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
                            _mm256_store_si256(
                                reinterpret_cast<__m256i*>(to),
                                _mm256_sub_epi32(both, _mm512_castsi512_si256(excess)));
                        } else {
                            _mm512_store_si512(to, _mm512_sub_epi32(all, excess));
                        }
                    }
                }
            }
        }
        ahead = own_ahead;
    }
};

}  // namespace

namespace hillinfer {
const CodedKernels kAvx512Coded = coded_kernels_of<Avx512>();
}
