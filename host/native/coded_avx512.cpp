// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens with AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products: those of four tokens. Addends
// have 15 bits and are taken byte by byte; codes stay in the high nibble, sixteen times themselves.
#include <immintrin.h>

#include "coded_kernels.h"
#include "coded_rows_avx512.h"
#include "coded_weights_avx512.h"

namespace {

// As _mm512_dpbusd_epi32; gcc takes sums of that apart, puts them together in another order and copies
// them.
inline void add_products(__m512i& sum, __m512i addends, __m512i codes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(addends), "v"(codes));
}

inline __m512i repeated(const uint8_t* quad) {
    int32_t word;
    std::memcpy(&word, quad, sizeof word);
    return _mm512_set1_epi32(word);
}

struct Avx512 : RowsAvx512, WeightsAvx512 {
    using WeightsAvx512::Addends;
    using WeightsAvx512::kChunkHeads;
    static constexpr bool kAddsSums = true;
    using Added = AddedSums<kChunkHeads>;

    // Where codes lie. Each pass over them arranges them again, beside its products: to store them once
    // costs more, as a store of 64 bytes holds products up for one or two cycles (Zen 4).
    struct Arranged {
        const uint64_t* rows;
        size_t start;
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

    static void arrange(const uint64_t* rows, size_t start, int, int, Arranged& out) {
        out = {rows, start};
    }

    static void sums(const Arranged& arranged, int blocks, int tokens, const Addends& addends, int heads,
                     Ahead& ahead, int32_t (*out)[kMostCodedChannels]) {
        const auto store = [&](int head, int place, __m512i sixteenfold) {
            _mm512_storeu_si512(out[head] + place, _mm512_srai_epi32(sixteenfold, 4));
        };
        run(arranged, blocks, tokens, addends, heads, ahead, store);
    }

    static void add_sums(const Arranged& arranged, int blocks, int tokens, const Addends& addends,
                         int heads, Ahead& ahead, const Added& added) {
        run(arranged, blocks, tokens, addends, heads, ahead, Adding(added, heads));
    }

private:
    // Adds sums of codes, sixteen times themselves, to those of heads.
    class Adding {
    public:
        Adding(const Added& added, int heads) : added_(added) {
            for (int head = 0; head < heads; ++head) {
                totals_[head] = added.totals[head] * 16;
                factors_[head] = added.factors[head] / 16;
            }
        }

        void operator()(int head, int place, __m512i sixteenfold) const {
            float* const to = added_.sums[head] + place;
            const __m512 own = _mm512_fmadd_ps(_mm512_set1_ps(totals_[head]),
                                               _mm512_loadu_ps(added_.means + place),
                                               _mm512_cvtepi32_ps(sixteenfold));
            const __m512 unit =
                _mm512_mul_ps(_mm512_loadu_ps(added_.units + place), _mm512_set1_ps(factors_[head]));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(own, unit, _mm512_loadu_ps(to)));
        }

    private:
        const Added& added_;
        float totals_[kChunkHeads];
        float factors_[kChunkHeads];
    };

    static __m256i load_half(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }

    // 64 bytes of a quad of tokens, or where a head has two blocks of 16 bytes, 32 of an octet.
    template <bool kTwoBlocks>
    static void load(const uint64_t* rows, size_t start, __mmask16 here, __m512i* of) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if constexpr (kTwoBlocks) {
                of[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_half(at(rows[i]) + start)),
                                           load_half(at(rows[4 + i]) + start), 1);
            } else {
                of[i] = _mm512_maskz_loadu_epi32(here, at(rows[i]) + start);
            }
        }
    }

    // Bytes of four tokens beside each other: those of channels 0 to 3, 4 to 7, and so on, of each block.
    static __m512i quarter_of(const __m512i* of, int quarter) {
        const bool low = quarter < 2;
        const __m512i even =
            low ? _mm512_unpacklo_epi8(of[0], of[1]) : _mm512_unpackhi_epi8(of[0], of[1]);
        const __m512i odd =
            low ? _mm512_unpacklo_epi8(of[2], of[3]) : _mm512_unpackhi_epi8(of[2], of[3]);
        return quarter % 2 ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
    }

    template <class Take>
    static void run(const Arranged& arranged, int blocks, int tokens, const Addends& addends, int heads,
                    Ahead& ahead, const Take& take) {
        if (blocks == 2) {
            run_heads<true>(arranged, blocks, tokens, addends, heads, ahead, take);
        } else {
            run_heads<false>(arranged, blocks, tokens, addends, heads, ahead, take);
        }
    }

    template <bool kTwoBlocks, class Take>
    static void run_heads(const Arranged& arranged, int blocks, int tokens, const Addends& addends,
                          int heads, Ahead& ahead, const Take& take) {
        // As many quarters at once as there are registers for.
        switch (heads) {
            case 1:
                return sums_of_heads<kTwoBlocks, 1, 4>(arranged, blocks, tokens, addends, ahead, take);
            case 2:
                return sums_of_heads<kTwoBlocks, 2, 2>(arranged, blocks, tokens, addends, ahead, take);
            case 3:
                return sums_of_heads<kTwoBlocks, 3, 2>(arranged, blocks, tokens, addends, ahead, take);
            default:
                return sums_of_heads<kTwoBlocks, 4, 1>(arranged, blocks, tokens, addends, ahead, take);
        }
    }

    // take(head, place of the first of 16 sums, the sums sixteenfold).
    template <bool kTwoBlocks, int kHeads, int kQuarters, class Take>
    __attribute__((noinline)) static void sums_of_heads(const Arranged& arranged, int blocks, int tokens,
                                                        const Addends& addends, Ahead& ahead,
                                                        const Take& take) {
        for (int vector = 0; vector * 4 < blocks; ++vector) {
            const int left = blocks - 4 * vector;
            const __mmask16 here = left >= 4 ? 0xFFFF : __mmask16((1u << (4 * left)) - 1);
            const Arranged own{arranged.rows, arranged.start + size_t(vector) * 64};
            pass<kTwoBlocks, kHeads, kQuarters, 0>(own, here, vector * 4, tokens, addends, ahead, take);
            if constexpr (kQuarters < 4) {
                pass<kTwoBlocks, kHeads, kQuarters, kQuarters>(own, here, vector * 4, tokens, addends,
                                                               ahead, take);
            }
            if constexpr (kQuarters < 2) {
                pass<kTwoBlocks, kHeads, kQuarters, 2>(own, here, vector * 4, tokens, addends, ahead,
                                                       take);
                pass<kTwoBlocks, kHeads, kQuarters, 3>(own, here, vector * 4, tokens, addends, ahead,
                                                       take);
            }
        }
    }

    template <bool kTwoBlocks, int kHeads, int kQuarters, int kFirst, class Take>
    [[gnu::always_inline]] static void pass(const Arranged& arranged, __mmask16 here, int base,
                                            int tokens, const Addends& addends, Ahead& ahead,
                                            const Take& take) {
        constexpr int kTokens = kTwoBlocks ? 8 : 4;
        const int steps = tokens / kTokens;
        Ahead own_ahead = ahead;
        // Of low and high nibbles, by low and high bytes.
        __m512i sums[kQuarters][kHeads][2][2];
#pragma GCC unroll 4
        for (auto& quarter : sums) {
#pragma GCC unroll 4
            for (auto& own : quarter) {
                own[0][0] = own[0][1] = own[1][0] = own[1][1] = _mm512_setzero_si512();
            }
        }
        for (int step = 0; step < steps; ++step) {
            own_ahead.touch();
            __m512i of[4], codes[kQuarters];
            load<kTwoBlocks>(arranged.rows + step * kTokens, arranged.start, here, of);
#pragma GCC unroll 4
            for (int quarter = 0; quarter < kQuarters; ++quarter) {
                codes[quarter] = quarter_of(of, kFirst + quarter);
            }
            add_step<kTwoBlocks, kHeads, kQuarters>(codes, addends, step, sums);
        }
#pragma GCC unroll 4
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            const int place = (base + kFirst + quarter) * (kTwoBlocks ? 16 : 32);
#pragma GCC unroll 4
            for (int head = 0; head < kHeads; ++head) {
                hand<kTwoBlocks>(sums[quarter][head], head, place, take);
            }
        }
        ahead = own_ahead;
    }

    template <bool kTwoBlocks, class Take>
    [[gnu::always_inline]] static void hand(const __m512i (*sums)[2], int head, int place,
                                            const Take& take) {
        const __m512i low = joined(sums[0]), high = joined(sums[1]);
        if constexpr (kTwoBlocks) {
            // Of the first quads and the second ones.
            take(head, place, _mm512_add_epi32(_mm512_shuffle_i64x2(low, high, 0x44),
                                               _mm512_shuffle_i64x2(low, high, 0xEE)));
        } else {
            take(head, place, low);
            take(head, place + 16, high);
        }
    }

    static __m512i joined(const __m512i* sums) {
        return _mm512_add_epi32(sums[0], _mm512_slli_epi32(sums[1], 8));
    }

    template <bool kTwoBlocks, int kHeads, int kQuarters>
    [[gnu::always_inline]] static void add_step(const __m512i* codes, const Addends& addends, int step,
                         __m512i (*sums)[kHeads][2][2]) {
        const __m512i nibble = _mm512_set1_epi8(int8_t(0xF0));
        __m512i low[kQuarters], high[kQuarters];
#pragma GCC unroll 4
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
            const __m512i own = codes[quarter];
            low[quarter] = _mm512_and_si512(_mm512_slli_epi16(own, 4), nibble);
            high[quarter] = _mm512_and_si512(own, nibble);
        }
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
#pragma GCC unroll 4
                for (int quarter = 0; quarter < kQuarters; ++quarter) {
                    add_products(sums[quarter][head][0][part], own, low[quarter]);
                    add_products(sums[quarter][head][1][part], own, high[quarter]);
                }
            }
        }
    }
};

}  // namespace

namespace hillinfer {
const CodedKernels kAvx512Coded = coded_kernels_of<Avx512>();
}
