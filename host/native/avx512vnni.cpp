// SPDX-License-Identifier: Apache-2.0
// Products with AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to 32 bits without
// saturating. Key codes become unsigned (+128, +8, +2).
#include <immintrin.h>

#include "tile_heads.h"

namespace {

// Beats of a group are read in order; the processor alone does not fetch far enough ahead.
constexpr int kAhead = 8192;

inline __m512i load(const uint8_t* bytes) {
    _mm_prefetch(reinterpret_cast<const char*>(bytes + kAhead), _MM_HINT_T0);
    return _mm512_loadu_si512(reinterpret_cast<const void*>(bytes));
}

template <int kBits>
struct HeadTile;

// A beat: 4 tokens of 16 bytes.
template <>
struct HeadTile<8> {
    static constexpr int kSliceBytes = 16;

    static void arrange(const int8_t* codes, int8_t* out) { std::memcpy(out, codes, 16); }

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        const __m512i top = _mm512_set1_epi8(int8_t(0x80));
        // One for even and one for odd slices: an addition must not wait for the one before.
        __m512i sums[4][2];
        for (auto& pair : sums) {
            pair[0] = pair[1] = _mm512_setzero_si512();
        }
        for (int slice = 0; slice < slices; slice += 2) {
            for (int odd = 0; odd < 2 && slice + odd < slices; ++odd) {
                const __m512i codes = _mm512_xor_si512(load(beats + (slice + odd) * 64), top);
                for (int head = 0; head < kHeads; ++head) {
                    const int8_t* own = query + head * stride + (slice + odd) * kSliceBytes;
                    const __m512i repeated = _mm512_broadcast_i32x4(
                        _mm_loadu_si128(reinterpret_cast<const __m128i*>(own)));
                    sums[head][odd] = _mm512_dpbusd_epi32(sums[head][odd], codes, repeated);
                }
            }
        }
        __m512i a = _mm512_add_epi32(sums[0][0], sums[0][1]);
        __m512i b = _mm512_add_epi32(sums[1][0], sums[1][1]);
        __m512i c = _mm512_add_epi32(sums[2][0], sums[2][1]);
        __m512i d = _mm512_add_epi32(sums[3][0], sums[3][1]);
        // Lane of 128 bits: a token; in it afterwards the sums of four heads.
        const __m512i ab =
            _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd =
            _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i all =
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i by_head = _mm512_permutexvar_epi32(order, all);
        alignas(64) int32_t values[16];
        _mm512_store_si512(values, by_head);
        for (int head = 0; head < kHeads; ++head) {
            std::memcpy(products + head * kGroupTokens, values + head * 4, 16);
        }
    }
};

// A beat: 8 tokens of 8 bytes.
template <>
struct HeadTile<4> {
    static constexpr int kSliceBytes = 16;

    static void arrange(const int8_t* codes, int8_t* out) {
        for (int i = 0; i < 8; ++i) {
            out[i] = codes[2 * i];
            out[8 + i] = codes[2 * i + 1];
        }
    }

    static __m512i repeated(const int8_t* query) {
        int64_t word;
        std::memcpy(&word, query, sizeof word);
        return _mm512_set1_epi64(word);
    }

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        const __m512i top = _mm512_set1_epi8(int8_t(0x88));
        const __m512i nibble = _mm512_set1_epi8(0x0F);
        __m512i sums[kHeads][2];
        for (auto& pair : sums) {
            pair[0] = pair[1] = _mm512_setzero_si512();
        }
        for (int slice = 0; slice < slices; ++slice) {
            const __m512i codes = _mm512_xor_si512(load(beats + slice * 64), top);
            const __m512i low = _mm512_and_si512(codes, nibble);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
            for (int head = 0; head < kHeads; ++head) {
                const int8_t* own = query + head * stride + slice * kSliceBytes;
                sums[head][0] = _mm512_dpbusd_epi32(sums[head][0], low, repeated(own));
                sums[head][1] = _mm512_dpbusd_epi32(sums[head][1], high, repeated(own + 8));
            }
        }
        for (int head = 0; head < kHeads; ++head) {
            const __m512i pairs = _mm512_add_epi32(sums[head][0], sums[head][1]);
            const __m512i tokens = _mm512_add_epi32(pairs, _mm512_srli_epi64(pairs, 32));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(products + head * kGroupTokens),
                                _mm512_cvtepi64_epi32(tokens));
        }
    }
};

// A beat: 16 tokens of 4 bytes.
template <>
struct HeadTile<2> {
    static constexpr int kSliceBytes = 16;

    static void arrange(const int8_t* codes, int8_t* out) {
        for (int i = 0; i < 16; ++i) {
            out[i % 4 * 4 + i / 4] = codes[i];
        }
    }

    static __m512i repeated(const int8_t* query) {
        int32_t word;
        std::memcpy(&word, query, sizeof word);
        return _mm512_set1_epi32(word);
    }

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        const __m512i top = _mm512_set1_epi8(int8_t(0xAA));
        const __m512i field = _mm512_set1_epi8(3);
        __m512i sums[kHeads][2];
        for (auto& pair : sums) {
            pair[0] = pair[1] = _mm512_setzero_si512();
        }
        for (int slice = 0; slice < slices; ++slice) {
            const __m512i codes = _mm512_xor_si512(load(beats + slice * 64), top);
            const __m512i first = _mm512_and_si512(codes, field);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(codes, 2), field);
            const __m512i third = _mm512_and_si512(_mm512_srli_epi16(codes, 4), field);
            const __m512i fourth = _mm512_and_si512(_mm512_srli_epi16(codes, 6), field);
            for (int head = 0; head < kHeads; ++head) {
                const int8_t* own = query + head * stride + slice * kSliceBytes;
                sums[head][0] = _mm512_dpbusd_epi32(sums[head][0], first, repeated(own));
                sums[head][1] = _mm512_dpbusd_epi32(sums[head][1], second, repeated(own + 4));
                sums[head][0] = _mm512_dpbusd_epi32(sums[head][0], third, repeated(own + 8));
                sums[head][1] = _mm512_dpbusd_epi32(sums[head][1], fourth, repeated(own + 12));
            }
        }
        for (int head = 0; head < kHeads; ++head) {
            _mm512_storeu_si512(products + head * kGroupTokens,
                                _mm512_add_epi32(sums[head][0], sums[head][1]));
        }
    }
};

struct Avx512Products : TileHeads<HeadTile, 4> {
    static constexpr int32_t zero_code(int code_bits) { return 1 << (code_bits - 1); }
};

}  // namespace

namespace hillinfer {
const Kernels kAvx512Vnni = kernels_of<Avx512Products>("avx512vnni");
}
