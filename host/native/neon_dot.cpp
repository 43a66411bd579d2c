// SPDX-License-Identifier: Apache-2.0
// Products with the dot product instructions of Armv8.2.
//
// sdot multiplies signed bytes and adds four products to 32 bits, so key codes stay signed: a code
// moved to the top of its byte is shifted down again with its sign.
#include <arm_neon.h>

#include "tile_heads.h"

namespace {

inline int8x16_t load(const uint8_t* bytes) { return vreinterpretq_s8_u8(vld1q_u8(bytes)); }

template <int kBits>
struct HeadTile;

// A quarter of a beat: one token of 16 bytes.
template <>
struct HeadTile<8> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 1;

    static void arrange(const int8_t* codes, int8_t* out) { std::memcpy(out, codes, 16); }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        int32x4_t sums[kHeads][4];
        for (auto& tokens : sums) {
            for (auto& sum : tokens) {
                sum = vdupq_n_s32(0);
            }
        }
        for (int slice = 0; slice < slices; ++slice) {
            int8x16_t keys[4];
            for (int token = 0; token < 4; ++token) {
                keys[token] = load(beats + slice * 64 + token * 16);
            }
            for (int head = 0; head < kHeads; ++head) {
                const int8x16_t own = vld1q_s8(query + head * stride + slice * kSliceBytes);
                for (int token = 0; token < 4; ++token) {
                    sums[head][token] = vdotq_s32(sums[head][token], keys[token], own);
                }
            }
        }
        for (int head = 0; head < kHeads; ++head) {
            vst1q_s32(products + head * kGroupTokens,
                      vpaddq_s32(vpaddq_s32(sums[head][0], sums[head][1]),
                                 vpaddq_s32(sums[head][2], sums[head][3])));
        }
    }
};

// A quarter of a beat: two tokens of 8 bytes.
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

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        int32x4_t sums[kHeads][4];
        for (auto& tokens : sums) {
            for (auto& sum : tokens) {
                sum = vdupq_n_s32(0);
            }
        }
        for (int slice = 0; slice < slices; ++slice) {
            int8x16_t low[4];
            int8x16_t high[4];
            for (int part = 0; part < 4; ++part) {
                const int8x16_t codes = load(beats + slice * 64 + part * 16);
                low[part] = vshrq_n_s8(vshlq_n_s8(codes, 4), 4);
                high[part] = vshrq_n_s8(codes, 4);
            }
            for (int head = 0; head < kHeads; ++head) {
                const int8_t* own = query + head * stride + slice * kSliceBytes;
                const int8x8_t even = vld1_s8(own);
                const int8x8_t odd = vld1_s8(own + 8);
                for (int part = 0; part < 4; ++part) {
                    sums[head][part] =
                        vdotq_s32(sums[head][part], low[part], vcombine_s8(even, even));
                    sums[head][part] =
                        vdotq_s32(sums[head][part], high[part], vcombine_s8(odd, odd));
                }
            }
        }
        for (int head = 0; head < kHeads; ++head) {
            int32_t* own = products + head * kGroupTokens;
            vst1q_s32(own, vpaddq_s32(sums[head][0], sums[head][1]));
            vst1q_s32(own + 4, vpaddq_s32(sums[head][2], sums[head][3]));
        }
    }
};

// A quarter of a beat: four tokens of 4 bytes.
template <>
struct HeadTile<2> {
    static constexpr int kSliceBytes = 16;
    static constexpr int kMostTiles = 1;

    static void arrange(const int8_t* codes, int8_t* out) {
        for (int i = 0; i < 16; ++i) {
            out[i % 4 * 4 + i / 4] = codes[i];
        }
    }

    static int8x16_t repeated(const int8_t* query) {
        int32_t word;
        std::memcpy(&word, query, sizeof word);
        return vreinterpretq_s8_s32(vdupq_n_s32(word));
    }

    template <int kHeads, class Ahead>
    static void run(const uint8_t* beats, Ahead, size_t, int slices,
                    const int8_t* query, size_t stride, int32_t* products) {
        for (int part = 0; part < 4; ++part) {
            int32x4_t sums[kHeads];
            for (auto& sum : sums) {
                sum = vdupq_n_s32(0);
            }
            for (int slice = 0; slice < slices; ++slice) {
                const int8x16_t codes = load(beats + slice * 64 + part * 16);
                const int8x16_t first = vshrq_n_s8(vshlq_n_s8(codes, 6), 6);
                const int8x16_t second = vshrq_n_s8(vshlq_n_s8(codes, 4), 6);
                const int8x16_t third = vshrq_n_s8(vshlq_n_s8(codes, 2), 6);
                const int8x16_t fourth = vshrq_n_s8(codes, 6);
                for (int head = 0; head < kHeads; ++head) {
                    const int8_t* own = query + head * stride + slice * kSliceBytes;
                    sums[head] = vdotq_s32(sums[head], first, repeated(own));
                    sums[head] = vdotq_s32(sums[head], second, repeated(own + 4));
                    sums[head] = vdotq_s32(sums[head], third, repeated(own + 8));
                    sums[head] = vdotq_s32(sums[head], fourth, repeated(own + 12));
                }
            }
            for (int head = 0; head < kHeads; ++head) {
                vst1q_s32(products + head * kGroupTokens + part * 4, sums[head]);
            }
        }
    }
};

struct NeonProducts : TileHeads<HeadTile, 4>, NearWeights {
    static constexpr int32_t zero_code(int) { return 0; }
};

}  // namespace

namespace hillinfer {
const Kernels kNeonDot = kernels_of<NeonProducts>("neon");
}
