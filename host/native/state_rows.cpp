// SPDX-License-Identifier: Apache-2.0
// Rows of a drive become the keys and values of a cache in memory: head by head, in its own type.
#include "state_rows.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api.h"
#include "coded_rows.h"
#include "crc32c.h"
#include "exact_floats.h"

namespace hillinfer {
namespace {

// So many tokens are gone through once per head: their rows stay in the cache meanwhile.
constexpr int64_t kTokens = 64;
constexpr int64_t kItemBytes = 2;

void widen_plainly(int32_t stored_type, const uint8_t* from, int64_t count, float* out) {
    plain_widen(stored_type, from, int(count), out);
}

#if defined(__x86_64__)
#define HILLINFER_WIDE __attribute__((target("avx512f")))
bool is_wide() { return __builtin_cpu_supports("avx512f"); }

// Past the caches: nobody reads them before the whole layer is there, and what is written in part
// would first be read from memory.
HILLINFER_WIDE void widen_past(int32_t stored_type, const uint8_t* from, int64_t count,
                               float* out) {
    for (int64_t i = 0; i < count; i += 16) {
        const __m256i items =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kItemBytes * i));
        const __m512 wide = stored_type == kFloat16
                                ? _mm512_cvtph_ps(items)
                                : _mm512_castsi512_ps(
                                      _mm512_slli_epi32(_mm512_cvtepu16_epi32(items), 16));
        _mm512_stream_ps(out + i, wide);
    }
}

void settle() { _mm_sfence(); }
#else
bool is_wide() { return false; }
void widen_past(int32_t stored_type, const uint8_t* from, int64_t count, float* out) {
    widen_plainly(stored_type, from, count, out);
}
void settle() {}
#endif

bool fits_lines(const void* place) { return reinterpret_cast<uintptr_t>(place) % 64 == 0; }

void place(const StateRows& given) {
    // Halves may be subnormal, and are kept where a thread's own arithmetic flushes such numbers.
    const ExactFloats exact;
    const int64_t head_bytes = given.head_dim * kItemBytes;
    const bool past = is_wide() && given.head_dim % 16 == 0 && given.room_items % 16 == 0 &&
                      fits_lines(given.keys) && fits_lines(given.values);
    const auto widen = past ? widen_past : widen_plainly;
    for (int64_t first = 0; first < given.tokens; first += kTokens) {
        const int64_t stop = first + kTokens < given.tokens ? first + kTokens : given.tokens;
        for (int64_t part = 0; part < 2 * given.kv_heads; ++part) {
            const int64_t head = part % given.kv_heads;
            uint8_t* const room = part < given.kv_heads ? given.keys : given.values;
            const uint8_t* from = given.rows + first * given.row_bytes + part * head_bytes;
            const int64_t start = head * given.room_items + first * given.head_dim;
            const int64_t end = head * given.room_items + stop * given.head_dim;
            for (int64_t at = start; at < end; at += given.head_dim, from += given.row_bytes) {
                if (given.is_widened) {
                    widen(given.stored_type, from, given.head_dim,
                          reinterpret_cast<float*>(room) + at);
                } else {
                    std::memcpy(room + at * kItemBytes, from, size_t(head_bytes));
                }
            }
        }
    }
    settle();
}

}  // namespace

// Checks a group and places it at once: its rows are in this processor's cache then.
void land_group(const CheckedRows& given, int64_t group) {
    StateRows own = given.states;
    const int64_t first = group * kTokens;
    own.rows += first * own.row_bytes;
    given.sums[group] = crc32c(given.salts[group], own.rows, kTokens * own.row_bytes);
    own.tokens = std::clamp<int64_t>(given.placed - first, 0, kTokens);
    const int64_t item = own.is_widened ? int64_t(sizeof(float)) : kItemBytes;
    own.keys += first * own.head_dim * item;
    own.values += first * own.head_dim * item;
    place(own);
}

}  // namespace hillinfer

HILLINFER_API void hillinfer_place_states(const hillinfer::StateRows* given) {
    hillinfer::place(*given);
}
