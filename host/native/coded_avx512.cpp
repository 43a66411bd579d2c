// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens with AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products: those of four tokens. Addends
// have 15 bits and are taken byte by byte; codes become 1 to 15, and what is too much is subtracted.
#include <immintrin.h>

#include "coded_kernels.h"

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

struct Avx512 {
    static constexpr int kChunkHeads = 4;
    static constexpr int kQuads = kBlockTokens / 4;
    static constexpr int kMostVectors = kMostCodedChannels / 128;

    // Where a head has two blocks of 16 bytes, a vector has two quads of tokens, else one quad and up
    // to four blocks. Four vectors have the bytes of channels 0 to 3, 4 to 7, and so on, of each
    // block, those of four tokens beside each other.
    struct Arranged {
        __m512i codes[kMostVectors][4][kQuads];
    };

    static void arrange(const uint8_t* const* rows, int blocks, int tokens, Arranged& out) {
        if (blocks == 2) {
            for (int octet = 0; octet < tokens / 8; ++octet) {
                const uint8_t* const* own = rows + octet * 8;
                __m512i of[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    of[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_half(own[i])),
                                               load_half(own[4 + i]), 1);
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
                    of[i] = _mm512_maskz_loadu_epi32(here, rows[quad * 4 + i] + vector * 64);
                }
                transpose(of, &out.codes[vector][0][quad]);
            }
        }
    }

    static void sums(const Arranged& arranged, int blocks, int tokens,
                     const uint16_t (*addends)[kBlockTokens], int heads,
                     int32_t (*out)[kMostCodedChannels]) {
        alignas(64) Addends own;
        for (int head = 0; head < heads; ++head) {
            own.take(head, addends[head]);
        }
        const auto run = blocks == 2 ? sums_of<true>(heads) : sums_of<false>(heads);
        run(arranged, blocks, tokens, own, out);
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

    static void widen(int32_t stored_type, const uint8_t* from, int count, float* out) {
        for (int done = 0; done < count; done += 16) {
            const int left = count - done;
            const __mmask16 here = left >= 16 ? 0xFFFF : __mmask16((1u << left) - 1);
            const __m256i items = _mm256_maskz_loadu_epi16(here, from + 2 * done);
            _mm512_mask_storeu_ps(out + done, here,
                                  stored_type == hillinfer::kFloat16
                                      ? _mm512_cvtph_ps(items)
                                      : _mm512_castsi512_ps(_mm512_slli_epi32(
                                            _mm512_cvtepu16_epi32(items), 16)));
        }
    }

private:
    // Low and high bytes of a chunk's addends, and eight times their sums.
    struct Addends {
        uint8_t bytes[kChunkHeads][2][kBlockTokens];
        int32_t excess[kChunkHeads];

        void take(int head, const uint16_t* addends) {
            int32_t sum = 0;
            for (int i = 0; i < kBlockTokens; ++i) {
                bytes[head][0][i] = uint8_t(addends[i]);
                bytes[head][1][i] = uint8_t(addends[i] >> 8);
                sum += addends[i];
            }
            excess[head] = 8 * sum;
        }
    };

    using Sums = void (*)(const Arranged&, int, int, const Addends&, int32_t (*)[kMostCodedChannels]);

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
                              int32_t (*out)[kMostCodedChannels]) {
        const __m512i nibble = _mm512_set1_epi8(0x0F);
        const int steps = tokens / (kTwoBlocks ? 8 : 4);
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
                        int32_t* const to = out[head] + vector * 128 + half * 16 + quarter * 4;
                        if constexpr (kTwoBlocks) {
                            const __m256i both = _mm256_sub_epi32(
                                _mm256_add_epi32(_mm512_castsi512_si256(all),
                                                 _mm512_extracti64x4_epi64(all, 1)),
                                _mm512_castsi512_si256(excess));
                            store(to, _mm256_castsi256_si128(both));
                            store(to + 32, _mm256_extracti128_si256(both, 1));
                        } else {
                            const __m512i exact = _mm512_sub_epi32(all, excess);
                            store(to, _mm512_castsi512_si128(exact));
                            store(to + 32, _mm512_extracti32x4_epi32(exact, 1));
                            store(to + 64, _mm512_extracti32x4_epi32(exact, 2));
                            store(to + 96, _mm512_extracti32x4_epi32(exact, 3));
                        }
                    }
                }
            }
        }
    }

    static void store(int32_t* to, __m128i values) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), values);
    }
};

}  // namespace

namespace hillinfer {
const CodedKernels kAvx512Coded = coded_kernels_of<Avx512>();
}
