// SPDX-License-Identifier: Apache-2.0
#include "row_sums.h"

#include <cstring>
#include <initializer_list>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "api.h"

namespace hillinfer {
namespace {

constexpr int kPairs = 4;
constexpr int64_t kStripeBytes = kPairs * 16;
// Odd numbers without a pattern.
constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
constexpr uint64_t kMix = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kLow = 0xFFFFFFFFu;

// Two lanes. GCC and Clang make of these whatever the processor has; the product alone they would
// make of four.
typedef uint64_t Pair __attribute__((vector_size(16)));

inline Pair product_of_halves(Pair keyed) {
#if defined(__SSE2__)
    const __m128i own = reinterpret_cast<__m128i>(keyed);
    return reinterpret_cast<Pair>(_mm_mul_epu32(own, _mm_srli_epi64(own, 32)));
#elif defined(__ARM_NEON)
    const uint64x2_t own = reinterpret_cast<uint64x2_t>(keyed);
    return reinterpret_cast<Pair>(vmull_u32(vmovn_u64(own), vshrn_n_u64(own, 32)));
#else
    return (keyed & kLow) * (keyed >> 32);
#endif
}

uint32_t row_sum(const uint8_t* row, int64_t stripes) {
    Pair lanes[kPairs], plain[kPairs], keys[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) {
        keys[pair] = Pair{kMix * uint64_t(4 * pair + 1), kMix * uint64_t(4 * pair + 3)};
        lanes[pair] = plain[pair] = keys[pair];
    }
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
        for (int pair = 0; pair < kPairs; ++pair) {
            Pair words;
            std::memcpy(&words, row + stripe * kStripeBytes + pair * sizeof words, sizeof words);
            lanes[pair] += product_of_halves(words ^ keys[pair]);
            plain[pair] += words;
            keys[pair] += kStep;
        }
    }
    uint64_t sum = 0;
    for (int pair = 0; pair < kPairs; ++pair) {
        for (const uint64_t lane : {lanes[pair][0], lanes[pair][1], plain[pair][0], plain[pair][1]}) {
            sum = (sum ^ lane) * kMix;
            sum ^= sum >> 29;
        }
    }
    return uint32_t(sum * kStep >> 32);
}

}  // namespace

void row_sums(const uint8_t* memory, int64_t row_bytes, const int64_t* places, int64_t count,
              uint32_t* sums) {
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = row_sum(memory + places[i] * row_bytes, row_bytes / kStripeBytes);
    }
}

}  // namespace hillinfer

HILLINFER_API void hillinfer_row_sums(const uint8_t* memory, int64_t row_bytes,
                                      const int64_t* places, int64_t count, uint32_t* sums) {
    hillinfer::row_sums(memory, row_bytes, places, count, sums);
}
