// SPDX-License-Identifier: Apache-2.0
// Products with AVX2.
//
// vpmaddubsw adds two products in 16 bits and saturates there. INT8 codes are therefore widened to
// 16 bits and multiplied by vpmaddwd, which cannot. INT4 and INT2 codes become unsigned (+8, +2):
// two products are at most 2 * 15 * 127 = 3,810 or 2 * 3 * 127 = 762, a slice adds two or four such
// pairs to a 16-bit sum, and sums are widened before 32,767 is in reach.
#include <immintrin.h>

#include "tile_heads.h"

namespace {

inline __m256i twice(const int8_t* query) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(query)));
}

inline __m256i load(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

inline void store(int32_t* to, __m128i values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), values);
}

inline void store(int32_t* to, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
}

// gcc would take sums apart and put them together in another order, for which there are not
// registers enough; it must not see through an addition.
inline void add_to(__m256i& sum, __m256i values) {
    sum = _mm256_add_epi32(sum, values);
    asm volatile("" : "+x"(sum));
}

inline void add_narrow(__m256i& sum, __m256i values) {
    sum = _mm256_add_epi16(sum, values);
    asm volatile("" : "+x"(sum));
}

template <int kBits>
struct HeadTile;

// A beat: 4 tokens of 16 channels. Even and odd channels apart, so that a token's 16 products are
// added in one 128-bit lane.
template <>
struct HeadTile<8> {
    static constexpr int kSliceBytes = 32;
    static constexpr int kMostTiles = 1;

    static void arrange(const int8_t* codes, int8_t* out) {
        int16_t wide[16];
        for (int i = 0; i < 8; ++i) {
            wide[i] = codes[2 * i];
            wide[8 + i] = codes[2 * i + 1];
        }
        std::memcpy(out, wide, sizeof wide);
    }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        // Two tokens in each half: with four heads, eight sums and what they need fill the registers.
        __m256i sums[kHeads][2];
#pragma GCC unroll 4
        for (auto& halves : sums) {
            halves[0] = halves[1] = _mm256_setzero_si256();
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + 64, query += kSliceBytes) {
            ahead.fetch(beats);
            const __m256i first = load(beats);
            const __m256i second = load(beats + 32);
            const __m256i first_odd = _mm256_srai_epi16(first, 8);
            const __m256i second_odd = _mm256_srai_epi16(second, 8);
            const __m256i first_even = _mm256_srai_epi16(_mm256_slli_epi16(first, 8), 8);
            const __m256i second_even = _mm256_srai_epi16(_mm256_slli_epi16(second, 8), 8);
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const __m256i even = twice(query + head * stride);
                const __m256i odd = twice(query + head * stride + 16);
                add_to(sums[head][0], _mm256_madd_epi16(first_even, even));
                add_to(sums[head][1], _mm256_madd_epi16(second_even, even));
                add_to(sums[head][0], _mm256_madd_epi16(first_odd, odd));
                add_to(sums[head][1], _mm256_madd_epi16(second_odd, odd));
            }
        }
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; head += 2) {
            const int other = head + 1 < kHeads ? head + 1 : head;
            const __m256i both = _mm256_permutevar8x32_epi32(
                _mm256_hadd_epi32(_mm256_hadd_epi32(sums[head][0], sums[head][1]),
                                  _mm256_hadd_epi32(sums[other][0], sums[other][1])),
                order);
            store(products + head * kGroupTokens, _mm256_castsi256_si128(both));
            store(products + other * kGroupTokens, _mm256_extracti128_si256(both, 1));
        }
    }
};

// A beat: 8 tokens of 8 bytes, low and high nibbles apart.
template <>
struct HeadTile<4> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 1;

    static void arrange(const int8_t* codes, int8_t* out) {
        for (int i = 0; i < 8; ++i) {
            out[i] = codes[2 * i];
            out[8 + i] = codes[2 * i + 1];
        }
    }

    static __m256i repeated(const int8_t* query) {
        int64_t word;
        std::memcpy(&word, query, sizeof word);
        return _mm256_set1_epi64x(word);
    }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        __m256i wide[kHeads][2];
        add_slices<kHeads, true>(beats, ahead, slices < 4 ? slices : 4, query, stride,
                                          wide);
        for (int done = 4; done < slices; done += 4) {
            add_slices<kHeads, false>(beats + done * 64, ahead + done * 64,
                                               slices - done < 4 ? slices - done : 4,
                                               query + done * kSliceBytes, stride, wide);
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            store(products + head * kGroupTokens,
                  _mm256_permute4x64_epi64(_mm256_hadd_epi32(wide[head][0], wide[head][1]),
                                           0b11011000));
        }
    }

private:
    // Adds up to four slices in 16 bits, and then to `wide`, or puts them there.
    template <int kHeads, bool kFirst, class Ahead>
    static void add_slices(const uint8_t* beats, Ahead ahead, int slices,
                           const int8_t* query, size_t stride, __m256i (*wide)[2]) {
        const __m256i top = _mm256_set1_epi8(int8_t(0x88));
        const __m256i nibble = _mm256_set1_epi8(0x0F);
        __m256i narrow[kHeads][2];
#pragma GCC unroll 4
        for (auto& halves : narrow) {
            halves[0] = halves[1] = _mm256_setzero_si256();
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + 64, query += kSliceBytes) {
            ahead.fetch(beats);
            const __m256i first = _mm256_xor_si256(load(beats), top);
            const __m256i second = _mm256_xor_si256(load(beats + 32), top);
            const __m256i first_low = _mm256_and_si256(first, nibble);
            const __m256i second_low = _mm256_and_si256(second, nibble);
            const __m256i first_high = _mm256_and_si256(_mm256_srli_epi16(first, 4), nibble);
            const __m256i second_high = _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble);
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                const __m256i even = repeated(query + head * stride);
                const __m256i odd = repeated(query + head * stride + 8);
                add_narrow(narrow[head][0], _mm256_maddubs_epi16(first_low, even));
                add_narrow(narrow[head][1], _mm256_maddubs_epi16(second_low, even));
                add_narrow(narrow[head][0], _mm256_maddubs_epi16(first_high, odd));
                add_narrow(narrow[head][1], _mm256_maddubs_epi16(second_high, odd));
            }
        }
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            for (int half = 0; half < 2; ++half) {
                const __m256i sum = _mm256_madd_epi16(narrow[head][half], ones);
                wide[head][half] = kFirst ? sum : _mm256_add_epi32(wide[head][half], sum);
            }
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

    static __m256i repeated(const int8_t* query) {
        int32_t word;
        std::memcpy(&word, query, sizeof word);
        return _mm256_set1_epi32(word);
    }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        __m256i wide[kHeads][2];
        add_slices<kHeads, true>(beats, ahead, slices < 8 ? slices : 8, query, stride,
                                          wide);
        for (int done = 8; done < slices; done += 8) {
            add_slices<kHeads, false>(beats + done * 64, ahead + done * 64,
                                               slices - done < 8 ? slices - done : 8,
                                               query + done * kSliceBytes, stride, wide);
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            store(products + head * kGroupTokens, wide[head][0]);
            store(products + head * kGroupTokens + 8, wide[head][1]);
        }
    }

private:
    // Adds up to eight slices in 16 bits, and then to `wide`, or puts them there.
    template <int kHeads, bool kFirst, class Ahead>
    static void add_slices(const uint8_t* beats, Ahead ahead, int slices,
                           const int8_t* query, size_t stride, __m256i (*wide)[2]) {
        const __m256i top = _mm256_set1_epi8(int8_t(0xAA));
        __m256i narrow[kHeads][2];
#pragma GCC unroll 4
        for (auto& halves : narrow) {
            halves[0] = halves[1] = _mm256_setzero_si256();
        }
        for (int slice = 0; slice < slices;
             ++slice, beats += 64, ahead = ahead + 64, query += kSliceBytes) {
            ahead.fetch(beats);
            const __m256i first = _mm256_xor_si256(load(beats), top);
            const __m256i second = _mm256_xor_si256(load(beats + 32), top);
            // Two of the four fields at a time: registers again.
            add_fields<kHeads>(first, second, query, stride, narrow);
            add_fields<kHeads>(_mm256_srli_epi16(first, 4), _mm256_srli_epi16(second, 4), query + 8,
                               stride, narrow);
        }
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            for (int half = 0; half < 2; ++half) {
                const __m256i sum = _mm256_madd_epi16(narrow[head][half], ones);
                wide[head][half] = kFirst ? sum : _mm256_add_epi32(wide[head][half], sum);
            }
        }
    }

    template <int kHeads>
    static void add_fields(__m256i first, __m256i second, const int8_t* query, size_t stride,
                           __m256i (*narrow)[2]) {
        const __m256i field = _mm256_set1_epi8(3);
        const __m256i first_low = _mm256_and_si256(first, field);
        const __m256i second_low = _mm256_and_si256(second, field);
        const __m256i first_high = _mm256_and_si256(_mm256_srli_epi16(first, 2), field);
        const __m256i second_high = _mm256_and_si256(_mm256_srli_epi16(second, 2), field);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            const __m256i low = repeated(query + head * stride);
            const __m256i high = repeated(query + head * stride + 4);
            add_narrow(narrow[head][0], _mm256_maddubs_epi16(first_low, low));
            add_narrow(narrow[head][1], _mm256_maddubs_epi16(second_low, low));
            add_narrow(narrow[head][0], _mm256_maddubs_epi16(first_high, high));
            add_narrow(narrow[head][1], _mm256_maddubs_epi16(second_high, high));
        }
    }
};

struct Avx2Products : TileHeads<HeadTile, 4>, NearWeights {
    // INT8 codes stay signed.
    static constexpr int32_t zero_code(int code_bits) {
        return code_bits == 8 ? 0 : 1 << (code_bits - 1);
    }
};

}  // namespace

namespace hillinfer {
const Kernels kAvx2 = kernels_of<Avx2Products>("avx2");
}
