// SPDX-License-Identifier: Apache-2.0
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#include "api.h"

namespace hillinfer {
namespace {

// x^32 + x^28 + ... with its bits in reverse order.
constexpr uint32_t kPolynomial = 0x82F63B78;
// Three of these are taken at once: the instruction takes three cycles, and one begins in each.
constexpr int64_t kStreamBytes = 4096;

using ByteTable = std::array<uint32_t, 256>;

ByteTable byte_table() {
    ByteTable table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) {
            rest = rest >> 1 ^ (rest & 1 ? kPolynomial : 0);
        }
        table[byte] = rest;
    }
    return table;
}

const ByteTable kBytes = byte_table();

// The state after kStreamBytes bytes of zeros, from each byte of the state before.
class Shift {
   public:
    Shift() {
        // What one bit of the state becomes: all is linear.
        std::array<uint32_t, 32> column;
        for (int bit = 0; bit < 32; ++bit) {
            uint32_t state = 1u << bit;
            for (int64_t byte = 0; byte < kStreamBytes; ++byte) {
                state = kBytes[state & 0xFF] ^ state >> 8;
            }
            column[bit] = state;
        }
        for (int at = 0; at < 4; ++at) {
            for (uint32_t byte = 0; byte < 256; ++byte) {
                uint32_t state = 0;
                for (int bit = 0; bit < 8; ++bit) {
                    state ^= byte >> bit & 1 ? column[8 * at + bit] : 0;
                }
                tables_[at][byte] = state;
            }
        }
    }

    uint32_t operator()(uint32_t state) const {
        return tables_[0][state & 0xFF] ^ tables_[1][state >> 8 & 0xFF] ^
               tables_[2][state >> 16 & 0xFF] ^ tables_[3][state >> 24];
    }

   private:
    std::array<ByteTable, 4> tables_;
};

const Shift kShift;

uint32_t portable(uint32_t state, const uint8_t* data, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        state = kBytes[(state ^ data[i]) & 0xFF] ^ state >> 8;
    }
    return state;
}

#if defined(__x86_64__)
#define HILLINFER_CRC_TARGET __attribute__((target("sse4.2")))
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
HILLINFER_CRC_TARGET inline uint64_t word_step(uint64_t state, uint64_t word) {
    return _mm_crc32_u64(state, word);
}
#elif defined(__aarch64__)
#define HILLINFER_CRC_TARGET __attribute__((target("+crc")))
// HWCAP_CRC32.
bool has_instruction() { return getauxval(AT_HWCAP) & 1 << 7; }
HILLINFER_CRC_TARGET inline uint64_t word_step(uint64_t state, uint64_t word) {
    return __crc32cd(uint32_t(state), word);
}
#endif

#if defined(HILLINFER_CRC_TARGET)
inline uint64_t word_at(const uint8_t* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

HILLINFER_CRC_TARGET uint32_t by_instruction(uint32_t state, const uint8_t* data, int64_t size) {
    while (size >= 3 * kStreamBytes) {
        uint64_t first = state, second = 0, third = 0;
        for (int64_t i = 0; i < kStreamBytes; i += 8) {
            first = word_step(first, word_at(data + i));
            second = word_step(second, word_at(data + kStreamBytes + i));
            third = word_step(third, word_at(data + 2 * kStreamBytes + i));
        }
        state = kShift(kShift(uint32_t(first)) ^ uint32_t(second)) ^ uint32_t(third);
        data += 3 * kStreamBytes;
        size -= 3 * kStreamBytes;
    }
    uint64_t wide = state;
    for (; size >= 8; size -= 8, data += 8) {
        wide = word_step(wide, word_at(data));
    }
    return portable(uint32_t(wide), data, size);
}
#endif

}  // namespace

uint32_t crc32c(uint32_t before, const uint8_t* data, int64_t size) {
#if defined(HILLINFER_CRC_TARGET)
    static const bool is_there = has_instruction();
    if (is_there) {
        return ~by_instruction(~before, data, size);
    }
#endif
    return ~portable(~before, data, size);
}

}  // namespace hillinfer

// Checksums of pieces of memory that follow one another, each going on behind a salt of its own.
HILLINFER_API void hillinfer_crc32c(const uint8_t* data, int64_t piece_bytes, int64_t count,
                                    const uint32_t* salts, uint32_t* sums) {
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = hillinfer::crc32c(salts[i], data + i * piece_bytes, piece_bytes);
    }
}
