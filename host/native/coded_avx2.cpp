// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens with AVX2, FMA and F16C.
//
// vpmaddwd multiplies 16-bit numbers and adds two products: those of two tokens. So codes of two
// tokens lie beside each other.
#include <immintrin.h>

#include "coded_kernels.h"

namespace {

struct Avx2 : PlainRows<Avx2> {
    static constexpr int kChunkHeads = 4;
    static constexpr bool kAddsSums = false;
    static constexpr int kPairs = kBlockTokens / 2;

    // For each 16 bytes of a row and each pair of tokens four vectors: channels 0 to 7, 8 to 15, and
    // so on, each with both tokens' codes.
    struct Arranged {
        __m256i codes[kMostCodedChannels / 32][kPairs][4];
    };

    struct Addends {
        alignas(64) uint16_t of[kChunkHeads][kBlockTokens];
    };

    static void weigh_units(const CodedUnit* units, int count, int tokens, Addends* addends,
                            CodedWeights (*out)[kChunkHeads]) {
        plain_weigh_units<Avx2>(units, count, tokens, addends, out);
    }

    // Sums have channels in their order.
    static int width(int blocks) { return blocks * 32; }
    static int place(int channel, int) { return channel; }

    static void arrange(const uint64_t* rows, size_t start, int blocks, int tokens, Arranged& out) {
        for (int pair = 0; pair < tokens / 2; ++pair) {
            for (int block = 0; block < blocks; ++block) {
                const __m128i first = load(at(rows[2 * pair]) + start + block * 16);
                const __m128i second = load(at(rows[2 * pair + 1]) + start + block * 16);
                const __m128i low = _mm_unpacklo_epi8(first, second);
                const __m128i high = _mm_unpackhi_epi8(first, second);
                // Words of two codes, one of each token, from bytes that have two.
                __m256i* to = out.codes[block][pair];
                const __m256i bottom = _mm256_cvtepi8_epi16(low);
                const __m256i top = _mm256_cvtepi8_epi16(high);
                to[0] = low_codes(bottom);
                to[1] = low_codes(top);
                to[2] = _mm256_srai_epi16(bottom, 4);
                to[3] = _mm256_srai_epi16(top, 4);
            }
        }
    }

    static void sums(const Arranged& arranged, int blocks, int tokens,
                     const Addends& addends, int heads, Ahead& ahead,
                     int32_t (*out)[kMostCodedChannels]) {
        for (int block = 0; block < blocks; ++block) {
            for (int head = 0; head < heads; head += 2) {
                const int other = head + 1 < heads ? head + 1 : head;
                __m256i sums[2][4];
                for (auto& own : sums) {
                    own[0] = own[1] = own[2] = own[3] = _mm256_setzero_si256();
                }
                for (int pair = 0; pair < tokens / 2; ++pair) {
                    ahead.touch();
                    const __m256i* codes = arranged.codes[block][pair];
                    const __m256i a = both(addends.of[head] + 2 * pair);
                    const __m256i b = both(addends.of[other] + 2 * pair);
                    for (int i = 0; i < 4; ++i) {
                        sums[0][i] = _mm256_add_epi32(sums[0][i], _mm256_madd_epi16(codes[i], a));
                        sums[1][i] = _mm256_add_epi32(sums[1][i], _mm256_madd_epi16(codes[i], b));
                    }
                }
                for (int i = 0; i < 4; ++i) {
                    store(out[head] + block * 32 + i * 8, sums[0][i]);
                    store(out[other] + block * 32 + i * 8, sums[1][i]);
                }
            }
        }
    }

    template <bool kBetween>
    static void powers(const int32_t* relative, int32_t* mantissa) {
        plain_powers<kBetween>(relative, mantissa);
    }

    static void widen(int32_t stored_type, const uint8_t* from, int count, float* out) {
        int done = 0;
        for (; done + 8 <= count; done += 8) {
            const __m128i items = load(from + 2 * done);
            _mm256_storeu_ps(out + done, stored_type == hillinfer::kFloat16
                                             ? _mm256_cvtph_ps(items)
                                             : _mm256_castsi256_ps(_mm256_slli_epi32(
                                                   _mm256_cvtepu16_epi32(items), 16)));
        }
        plain_widen(stored_type, from + 2 * done, count - done, out + done);
    }

private:
    static __m128i load(const uint8_t* from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    }

    static void store(int32_t* to, __m256i values) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
    }

    static __m256i low_codes(__m256i words) {
        return _mm256_srai_epi16(_mm256_slli_epi16(words, 12), 12);
    }

    // Of a pair of tokens.
    static __m256i both(const uint16_t* addends) {
        int32_t pair;
        std::memcpy(&pair, addends, sizeof pair);
        return _mm256_set1_epi32(pair);
    }
};

}  // namespace

namespace hillinfer {
const CodedKernels kAvx2Coded = coded_kernels_of<Avx2>();
}
