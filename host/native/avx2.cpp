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

// Beats of a group are read in order; the processor alone does not fetch far enough ahead.
constexpr int kAhead = 8192;

inline void fetch(const uint8_t* beats) {
    _mm_prefetch(reinterpret_cast<const char*>(beats + kAhead), _MM_HINT_T0);
}

template <int kBits>
struct HeadTile;

// A beat: 4 tokens of 16 channels. Even and odd channels apart, so that a token's 16 products are
// added in one 128-bit lane.
template <>
struct HeadTile<8> {
    static constexpr int kSliceBytes = 32;

    static void arrange(const int8_t* codes, int8_t* out) {
        int16_t wide[16];
        for (int i = 0; i < 8; ++i) {
            wide[i] = codes[2 * i];
            wide[8 + i] = codes[2 * i + 1];
        }
        std::memcpy(out, wide, sizeof wide);
    }

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        // Half a beat at a time: four heads' sums of all of it would not stay in registers.
        __m256i sums[2][kHeads];
        for (int half = 0; half < 2; ++half) {
            half_beat<kHeads>(beats + half * 32, slices, query, stride, sums[half]);
        }
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; head += 2) {
            const int other = head + 1 < kHeads ? head + 1 : head;
            const __m256i both = _mm256_permutevar8x32_epi32(
                _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0][head], sums[1][head]),
                                  _mm256_hadd_epi32(sums[0][other], sums[1][other])),
                order);
            store(products + head * kGroupTokens, _mm256_castsi256_si128(both));
            store(products + other * kGroupTokens, _mm256_extracti128_si256(both, 1));
        }
    }

private:
    template <int kHeads>
    static void half_beat(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                          __m256i* out) {
        __m256i sums[kHeads];
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            sums[head] = _mm256_setzero_si256();
        }
        for (int slice = 0; slice < slices; ++slice) {
            fetch(beats + slice * 64);
            const __m256i codes = load(beats + slice * 64);
            const __m256i odd = _mm256_srai_epi16(codes, 8);
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
            const int8_t* own = query + slice * kSliceBytes;
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                sums[head] = _mm256_add_epi32(
                    sums[head],
                    _mm256_add_epi32(
                        _mm256_madd_epi16(even, twice(own + head * stride)),
                        _mm256_madd_epi16(odd, twice(own + head * stride + 16))));
            }
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            out[head] = sums[head];
        }
    }
};

// Half a beat: 4 tokens, 8 bytes each.
template <>
struct HeadTile<4> {
    static constexpr int kSliceBytes = 16;

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

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i top = _mm256_set1_epi8(int8_t(0x88));
        const __m256i nibble = _mm256_set1_epi8(0x0F);
        for (int half = 0; half < 2; ++half) {
            __m256i wide[kHeads];
#pragma GCC unroll 4
            for (auto& sum : wide) {
                sum = _mm256_setzero_si256();
            }
            for (int start = 0; start < slices; start += 4) {
                __m256i narrow[kHeads];
#pragma GCC unroll 4
                for (auto& sum : narrow) {
                    sum = _mm256_setzero_si256();
                }
                const int stop = start + 4 < slices ? start + 4 : slices;
                for (int slice = start; slice < stop; ++slice) {
                    fetch(beats + slice * 64 + half * 32);
                    const __m256i codes =
                        _mm256_xor_si256(load(beats + slice * 64 + half * 32), top);
                    const __m256i low = _mm256_and_si256(codes, nibble);
                    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
#pragma GCC unroll 4
                    for (int head = 0; head < kHeads; ++head) {
                        const int8_t* own = query + head * stride + slice * kSliceBytes;
                        narrow[head] = _mm256_add_epi16(
                            narrow[head],
                            _mm256_add_epi16(_mm256_maddubs_epi16(low, repeated(own)),
                                             _mm256_maddubs_epi16(high, repeated(own + 8))));
                    }
                }
#pragma GCC unroll 4
                for (int head = 0; head < kHeads; ++head) {
                    wide[head] =
                        _mm256_add_epi32(wide[head], _mm256_madd_epi16(narrow[head], ones));
                }
            }
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; head += 2) {
                const int other = head + 1 < kHeads ? head + 1 : head;
                const __m256i both = _mm256_permute4x64_epi64(
                    _mm256_hadd_epi32(wide[head], wide[other]), 0b11011000);
                store(products + head * kGroupTokens + half * 4, _mm256_castsi256_si128(both));
                store(products + other * kGroupTokens + half * 4,
                      _mm256_extracti128_si256(both, 1));
            }
        }
    }
};

// Half a beat: 8 tokens, 4 bytes each.
template <>
struct HeadTile<2> {
    static constexpr int kSliceBytes = 16;

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

    template <int kHeads>
    static void run(const uint8_t* beats, int slices, const int8_t* query, size_t stride,
                    int32_t* products) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i top = _mm256_set1_epi8(int8_t(0xAA));
        const __m256i field = _mm256_set1_epi8(3);
        for (int half = 0; half < 2; ++half) {
            __m256i wide[kHeads];
#pragma GCC unroll 4
            for (auto& sum : wide) {
                sum = _mm256_setzero_si256();
            }
            for (int start = 0; start < slices; start += 8) {
                __m256i narrow[kHeads];
#pragma GCC unroll 4
                for (auto& sum : narrow) {
                    sum = _mm256_setzero_si256();
                }
                const int stop = start + 8 < slices ? start + 8 : slices;
                for (int slice = start; slice < stop; ++slice) {
                    fetch(beats + slice * 64 + half * 32);
                    const __m256i codes =
                        _mm256_xor_si256(load(beats + slice * 64 + half * 32), top);
                    const __m256i first = _mm256_and_si256(codes, field);
                    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(codes, 2), field);
                    const __m256i third = _mm256_and_si256(_mm256_srli_epi16(codes, 4), field);
                    const __m256i fourth = _mm256_and_si256(_mm256_srli_epi16(codes, 6), field);
#pragma GCC unroll 4
                    for (int head = 0; head < kHeads; ++head) {
                        const int8_t* own = query + head * stride + slice * kSliceBytes;
                        const __m256i lower =
                            _mm256_add_epi16(_mm256_maddubs_epi16(first, repeated(own)),
                                             _mm256_maddubs_epi16(second, repeated(own + 4)));
                        const __m256i upper =
                            _mm256_add_epi16(_mm256_maddubs_epi16(third, repeated(own + 8)),
                                             _mm256_maddubs_epi16(fourth, repeated(own + 12)));
                        narrow[head] =
                            _mm256_add_epi16(narrow[head], _mm256_add_epi16(lower, upper));
                    }
                }
#pragma GCC unroll 4
                for (int head = 0; head < kHeads; ++head) {
                    wide[head] =
                        _mm256_add_epi32(wide[head], _mm256_madd_epi16(narrow[head], ones));
                }
            }
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(products + head * kGroupTokens +
                                                               half * 8),
                                    wide[head]);
            }
        }
    }
};

struct Avx2Products : TileHeads<HeadTile, 4> {
    // INT8 codes stay signed.
    static constexpr int32_t zero_code(int code_bits) {
        return code_bits == 8 ? 0 : 1 << (code_bits - 1);
    }
};

}  // namespace

namespace hillinfer {
const Kernels kAvx2 = kernels_of<Avx2Products>("avx2");
}
