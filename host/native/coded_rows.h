// SPDX-License-Identifier: Apache-2.0
// Rows at their addresses: asked for early, and their items as floats.
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

// Lines of code rows that come next, touched one at a time while sums are computed: the processor has
// only so many on their way at once.
class Ahead {
public:
    Ahead() = default;

    Ahead(const uint64_t* rows, int64_t count, size_t start, size_t bytes)
        : row_(rows), stop_(rows + count), start_(start), bytes_(bytes) {
        open_row();
    }

    // The next line; whether there was one.
    bool touch() {
        if (line_ >= end_) {
            return false;
        }
        __builtin_prefetch(at(line_), 0, 2);
        line_ += 64;
        if (line_ >= end_) {
            ++row_;
            open_row();
        }
        return true;
    }

private:
    void open_row() {
        if (row_ != stop_) {
            line_ = (*row_ + start_) & ~uint64_t(63);
            end_ = *row_ + start_ + bytes_;
        }
    }

    const uint64_t* row_ = nullptr;
    const uint64_t* stop_ = nullptr;
    size_t start_ = 0;
    size_t bytes_ = 0;
    // Of the row that is open; the line is not below the end where none is left.
    uint64_t line_ = 0;
    uint64_t end_ = 0;
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
