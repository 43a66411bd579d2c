// SPDX-License-Identifier: Apache-2.0
// Products with AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to 32 bits without
// saturating. Key codes become unsigned (+128, +8, +2). Of INT8 and INT4 two tiles that
// follow each other are worked on at once: every query code is loaded once for both, and their sums
// are enough that no addition waits for the one before.
#include <immintrin.h>

#include "near_weights_avx512.h"
#include "tile_heads.h"

namespace {

template <class Ahead>
inline __m512i load(const uint8_t* bytes, Ahead ahead) {
    ahead.fetch(bytes);
    return _mm512_loadu_si512(reinterpret_cast<const void*>(bytes));
}

// gcc must not take sums apart and put them together in another order: there are not registers
// enough for that.
inline void add_products(__m512i& sum, __m512i codes, __m512i query) {
    sum = _mm512_dpbusd_epi32(sum, codes, query);
    asm("" : "+v"(sum));
}

inline void store(int32_t* to, __m128i values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), values);
}

inline void store(int32_t* to, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
}

template <int kBits>
struct HeadTile;

// A beat: 4 tokens of 16 bytes.
template <>
struct HeadTile<8> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 2;

    static void arrange(const int8_t* codes, int8_t* out) { std::memcpy(out, codes, 16); }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t tile_bytes, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        constexpr int kTiles = Ahead::template tiles<HeadTile>();
        const __m512i top = _mm512_set1_epi8(int8_t(0x80));
        __m512i sums[kHeads][kTiles];
#pragma GCC unroll 4
        for (auto& tiles : sums) {
#pragma GCC unroll 4
            for (auto& sum : tiles) {
                sum = _mm512_setzero_si512();
            }
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + kTiles * 64, query += kSliceBytes) {
            __m512i codes[kTiles];
#pragma GCC unroll 4
            for (int tile = 0; tile < kTiles; ++tile) {
                codes[tile] = _mm512_xor_si512(
                    load(beats + tile * tile_bytes, ahead + tile * 64), top);
            }
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const __m512i own = _mm512_broadcast_i32x4(_mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(query + head * stride)));
#pragma GCC unroll 4
                for (int tile = 0; tile < kTiles; ++tile) {
                    add_products(sums[head][tile], codes[tile], own);
                }
            }
        }
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; head += 2) {
            const int other = head + 1 < kHeads ? head + 1 : head;
            // Lane of 128 bits: a token of each tile; in it afterwards two heads' sums of two tiles.
            const __m512i first = pairs(sums[head][0], sums[head][kTiles - 1]);
            const __m512i second = pairs(sums[other][0], sums[other][kTiles - 1]);
            const __m512i all = _mm512_permutexvar_epi32(
                order, _mm512_add_epi32(_mm512_unpacklo_epi64(first, second),
                                        _mm512_unpackhi_epi64(first, second)));
            const __m256i own = _mm512_castsi512_si256(all);
            const __m256i others = _mm512_extracti64x4_epi64(all, 1);
            if (kTiles == 1) {
                store(products + head * kGroupTokens, _mm256_castsi256_si128(own));
                store(products + other * kGroupTokens, _mm256_castsi256_si128(others));
                continue;
            }
            store(products + head * kGroupTokens, own);
            store(products + other * kGroupTokens, others);
        }
    }

private:
    static __m512i pairs(__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
};

// A beat: 8 tokens of 8 bytes, low and high nibbles apart.
template <>
struct HeadTile<4> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 2;

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

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t tile_bytes, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        constexpr int kTiles = Ahead::template tiles<HeadTile>();
        const __m512i top = _mm512_set1_epi8(int8_t(0x88));
        const __m512i nibble = _mm512_set1_epi8(0x0F);
        // Of even and of odd channels.
        __m512i sums[kHeads][kTiles][2];
#pragma GCC unroll 4
        for (auto& tiles : sums) {
#pragma GCC unroll 2
            for (auto& pair : tiles) {
                pair[0] = pair[1] = _mm512_setzero_si512();
            }
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + kTiles * 64, query += kSliceBytes) {
            __m512i low[kTiles];
            __m512i high[kTiles];
#pragma GCC unroll 2
            for (int tile = 0; tile < kTiles; ++tile) {
                const __m512i codes = _mm512_xor_si512(
                    load(beats + tile * tile_bytes, ahead + tile * 64), top);
                low[tile] = _mm512_and_si512(codes, nibble);
                high[tile] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
            }
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const __m512i even = repeated(query + head * stride);
                const __m512i odd = repeated(query + head * stride + 8);
#pragma GCC unroll 2
                for (int tile = 0; tile < kTiles; ++tile) {
                    add_products(sums[head][tile][0], low[tile], even);
                    add_products(sums[head][tile][1], high[tile], odd);
                }
            }
        }
        const __m512i evens =
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            // Two neighbours are the sums of one token.
            const __m512i first = _mm512_add_epi32(sums[head][0][0], sums[head][0][1]);
            const __m512i second =
                _mm512_add_epi32(sums[head][kTiles - 1][0], sums[head][kTiles - 1][1]);
            const __m512i all = _mm512_add_epi32(_mm512_permutex2var_epi32(first, evens, second),
                                                 _mm512_permutex2var_epi32(first, odds, second));
            if (kTiles == 1) {
                store(products + head * kGroupTokens, _mm512_castsi512_si256(all));
                continue;
            }
            _mm512_storeu_si512(products + head * kGroupTokens, all);
        }
    }
};

// A beat: 16 tokens of 4 bytes, four fields in each of them.
template <>
struct HeadTile<2> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 1;

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

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        const __m512i top = _mm512_set1_epi8(int8_t(0xAA));
        const __m512i field = _mm512_set1_epi8(3);
        __m512i sums[kHeads][4];
#pragma GCC unroll 4
        for (auto& fields : sums) {
            fields[0] = fields[1] = fields[2] = fields[3] = _mm512_setzero_si512();
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + 64, query += kSliceBytes) {
            const __m512i codes = _mm512_xor_si512(load(beats, ahead), top);
            const __m512i first = _mm512_and_si512(codes, field);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(codes, 2), field);
            const __m512i third = _mm512_and_si512(_mm512_srli_epi16(codes, 4), field);
            const __m512i fourth = _mm512_and_si512(_mm512_srli_epi16(codes, 6), field);
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const int8_t* own = query + head * stride;
                add_products(sums[head][0], first, repeated(own));
                add_products(sums[head][1], second, repeated(own + 4));
                add_products(sums[head][2], third, repeated(own + 8));
                add_products(sums[head][3], fourth, repeated(own + 12));
            }
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            _mm512_storeu_si512(
                products + head * kGroupTokens,
                _mm512_add_epi32(_mm512_add_epi32(sums[head][0], sums[head][1]),
                                 _mm512_add_epi32(sums[head][2], sums[head][3])));
        }
    }
};

struct Avx512Products : TileHeads<HeadTile, 4>, NearWeightsAvx512 {
    static constexpr int32_t zero_code(int code_bits) { return 1 << (code_bits - 1); }
};

}  // namespace

namespace hillinfer {
const Kernels kAvx512Vnni = kernels_of<Avx512Products>("avx512vnni");
}
