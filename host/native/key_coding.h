// SPDX-License-Identifier: Apache-2.0
// Codes and token exponents from FP16 keys and values, into shadows (contract, sections 2, 3, 9 and 14).
#pragma once
#include "contract.h"
#include "kernels.h"

namespace {

constexpr int kMostChannels = 256;

// D of every channel of one key; returns max |D|, or -1 where the key holds a NaN.
inline int32_t centre(const uint16_t* __restrict key, const float* __restrict units,
                      const int32_t* __restrict means, int channels, int32_t* __restrict centred) {
    int32_t largest = 0;
    int32_t nan = 0;
    for (int i = 0; i < channels; ++i) {
        int32_t bits = key[i] & 0x7FFF;
        nan |= bits > 0x7C00 ? 1 : 0;
        // An infinity counts as the largest finite number.
        bits = bits > 0x7BFF ? 0x7BFF : bits;
        // Subnormals by hand: a thread may run with subnormal floats taken for zero.
        const float small = float(bits) * 5.9604644775390625e-8f;
        const float normal = float_of_bits((bits << 13) + (112 << 23));
        const float value = (bits < 0x400 ? small : normal) * units[i];
        const int32_t limited = int32_t(value > kProductLimit ? kProductLimit : value);
        const int32_t y = key[i] & 0x8000 ? -limited : limited;
        const int32_t d = y - means[i];
        const int32_t size = d < 0 ? -d : d;
        largest = size > largest ? size : largest;
        centred[i] = d;
    }
    return nan ? -1 : largest;
}

// Codes of one key, one byte each, and t.
inline int32_t key_codes(int code_bits, const int32_t* __restrict centred, int32_t largest,
                         int channels, int8_t* __restrict codes) {
    if (largest < 0) {
        std::memset(codes, 0, size_t(channels));
        return hillinfer::kInvalidExponent;
    }
    const int32_t length = largest ? 32 - __builtin_clz(uint32_t(largest)) : 0;
    const int32_t beyond = length - (code_bits == 8 ? 7 : 3);
    const int32_t exponent = beyond > 0 ? beyond : 0;
    if (code_bits == 2) {
        for (int i = 0; i < channels; ++i) {
            codes[i] = int8_t(clamp_int(centred[i] >> (exponent + 1), -2, 1));
        }
        return exponent;
    }
    const float unit = float_of_bits((127 - exponent) << 23);
    const float limit = code_bits == 8 ? 127.0f : 7.0f;
    for (int i = 0; i < channels; ++i) {
        // |D| < 2^24, so only rint rounds, half to even.
        const float code = __builtin_rintf(float(centred[i]) * unit);
        codes[i] = int8_t(int32_t(clamp_float(code, -limit, limit)));
    }
    return exponent;
}

// Packs 16 codes of one slice into 16, 8 or 4 bytes.
inline void pack_slice(int code_bits, const int8_t* codes, uint8_t* out) {
    if (code_bits == 8) {
        std::memcpy(out, codes, 16);
        return;
    }
    for (int half = 0; half < 2; ++half) {
        // Eight codes in the bytes of a word; each step joins neighbours, lower codes below.
        uint64_t word;
        std::memcpy(&word, codes + 8 * half, sizeof word);
        if (code_bits == 4) {
            word &= 0x0F0F0F0F0F0F0F0F;
            word = (word | word >> 4) & 0x00FF00FF00FF00FF;
            word = (word | word >> 8) & 0x0000FFFF0000FFFF;
            word |= word >> 16;
        } else {
            word &= 0x0303030303030303;
            word = (word | word >> 6) & 0x000F000F000F000F;
            word = (word | word >> 12) & 0x000000FF000000FF;
            word |= word >> 24;
        }
        std::memcpy(out + code_bits * half, &word, size_t(code_bits));
    }
}

// Codes tokens of FP16 numbers and hands each on: write(head, number, exponent, codes), codes with
// zeros behind the last channel. Strides in elements.
template <class Write>
inline void code_tokens(const hillinfer::Shape& shape, int code_bits, const uint16_t* keys,
                        int64_t token_stride, int64_t head_stride, int64_t channel_stride,
                        const hillinfer::Segment& segment, int64_t tokens, Write write) {
    const int channels = shape.head_dim;
    alignas(64) uint16_t gathered[kMostChannels];
    alignas(64) int32_t centred[kMostChannels];
    alignas(64) int8_t codes[kMostChannels];
    alignas(64) float units[kMostChannels];
    std::memset(codes, 0, sizeof codes);
    for (int head = 0; head < shape.kv_heads; ++head) {
        const size_t own = size_t(head) * channels;
        for (int i = 0; i < channels; ++i) {
            units[i] = float_of_bits((127 + 14 - segment.exponents[own + i]) << 23);
        }
        for (int64_t i = 0; i < tokens; ++i) {
            const uint16_t* key = keys + i * token_stride + head * head_stride;
            if (channel_stride != 1) {
                for (int j = 0; j < channels; ++j) {
                    gathered[j] = key[j * channel_stride];
                }
                key = gathered;
            }
            const int32_t largest =
                centre(key, units, segment.means + own, channels, centred);
            const int32_t exponent = key_codes(code_bits, centred, largest, channels, codes);
            write(head, i, exponent, codes);
        }
    }
}

void encode_keys(const hillinfer::Shape& shape, const uint16_t* keys, int64_t token_stride,
                 int64_t head_stride, int64_t channel_stride, const hillinfer::Segment& segment,
                 uint8_t* shadow, int64_t first_token, int64_t tokens) {
    const auto write = [&](int head, int64_t number, int32_t exponent, const int8_t* codes) {
        const int64_t token = first_token + number;
        uint8_t* group = shadow + size_t(token / hillinfer::kGroupTokens) * shape.group_bytes();
        const int in_group = int(token % hillinfer::kGroupTokens);
        group[head * hillinfer::kGroupTokens + in_group] = uint8_t(exponent);
        uint8_t* piece = group + size_t(shape.kv_heads) * hillinfer::kBeatBytes +
                         in_group / shape.tile_tokens() * shape.tile_bytes() +
                         size_t(head) * shape.slices() * hillinfer::kBeatBytes +
                         size_t(in_group % shape.tile_tokens() * shape.piece_bytes());
        for (int slice = 0; slice < shape.slices(); ++slice) {
            pack_slice(shape.code_bits, codes + slice * hillinfer::kSliceChannels,
                       piece + size_t(slice) * hillinfer::kBeatBytes);
        }
    };
    code_tokens(shape, shape.code_bits, keys, token_stride, head_stride, channel_stride, segment,
                tokens, write);
}

// Values become code rows, whatever the codes of keys (contract, section 14).
void encode_values(const hillinfer::Shape& shape, const uint16_t* values, int64_t token_stride,
                   int64_t head_stride, int64_t channel_stride, const hillinfer::Segment& segment,
                   const hillinfer::ValuePlaces& to, int64_t tokens) {
    constexpr int kHalf = hillinfer::kCodeBlockChannels / 2;
    const int dim = hillinfer::value_dim(shape.head_dim);
    const auto write = [&](int head, int64_t number, int32_t exponent, const int8_t* codes) {
        to.exponents[number * to.token_stride + head * to.head_stride] = uint8_t(exponent);
        uint8_t* row = to.rows + number * to.row_stride + size_t(head) * (dim / 2);
        for (int block = 0; block < dim; block += 2 * kHalf, row += kHalf) {
            for (int i = 0; i < kHalf; ++i) {
                row[i] = uint8_t((codes[block + i] & 15) | codes[block + kHalf + i] << 4);
            }
        }
    };
    code_tokens(shape, 4, values, token_stride, head_stride, channel_stride, segment, tokens, write);
}

}  // namespace
