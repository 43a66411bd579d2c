// SPDX-License-Identifier: Apache-2.0
// Loads of rows by address: software prefetch, and their 16-bit items as floats.
//
// Everything has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include "coded_weights.h"

namespace {

inline const uint8_t* at(uint64_t address) { return reinterpret_cast<const uint8_t*>(address); }

inline void fetch_bytes(const uint8_t* from, int64_t bytes) {
    const uint8_t* const stop = from + bytes;
    for (const uint8_t* line = from; line < stop; line += 64) {
        __builtin_prefetch(line, 0, 2);
    }
}

// Lines of code rows that come next, some of a row at a time, touched while sums are computed: the
// processor has only so many on their way at once. No branch hangs on where lines begin.
class Ahead {
public:
    Ahead() = default;

    // `last` is a row's last byte that is needed, from its `start` on.
    Ahead(const uint64_t* rows, int64_t count, size_t start, size_t last)
        : row_(rows), stop_(rows + count), start_(start), last_(last) {}

    // The next lines; whether there were some.
    bool touch() {
        if (row_ == stop_) {
            return false;
        }
        const uint8_t* const row = at(*row_) + start_;
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) {
            const size_t place = done_ + size_t(i) * 64;
            __builtin_prefetch(row + (place < last_ ? place : last_), 0, 2);
        }
        done_ += kLines * 64;
        // A row's last line may begin up to 63 bytes before its last byte.
        if (done_ >= last_ + 64) {
            done_ = 0;
            ++row_;
        }
        return true;
    }

private:
    static constexpr int kLines = 3;

    const uint64_t* row_ = nullptr;
    const uint64_t* stop_ = nullptr;
    size_t start_ = 0;
    size_t last_ = 0;
    size_t done_ = 0;
};

// Items of a stored row as floats.
inline float float_of_half(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7FFF) << 13;
    // The exponent's bias grows by 112, also where the number is subnormal.
    const float finite = float_of_bits(magnitude) * power_of_two(112);
    const uint32_t wide = magnitude >= (0x7C00u << 13) ? magnitude | 0x7F800000u
                                                       : bits_of_float(finite);
    return float_of_bits(wide | uint32_t(bits & 0x8000) << 16);
}

inline void plain_widen(int32_t stored_type, const uint8_t* __restrict from, int count,
                        float* __restrict out) {
    for (int i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, sizeof bits);
        out[i] = stored_type == hillinfer::kFloat16
                     ? float_of_half(bits)
                     : float_of_bits(uint32_t(bits) << 16);
    }
}

}  // namespace
