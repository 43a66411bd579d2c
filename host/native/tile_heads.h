// SPDX-License-Identifier: Apache-2.0
// A tile's products for any number of heads, from kernels for a fixed number of them.
#pragma once
#include "group_scores.h"

namespace {

// From what is worked on to what comes to the second cache, and to what comes from there to the first.
// The processor alone does not look far enough ahead, and the first cache waits for fewer lines at
// once than memory takes time for.
constexpr size_t kFarAhead = 24576;
constexpr size_t kNearAhead = 4096;

// Tiles that follow each other in memory: as many at once as a kernel takes.
struct Streamed {
    template <class Kernel>
    static constexpr int tiles() {
        return Kernel::kMostTiles;
    }

    Streamed operator+(size_t bytes) const { return {far + bytes}; }

    void fetch(const uint8_t* beat) const {
        __builtin_prefetch(far, 0, 2);
        __builtin_prefetch(beat + kNearAhead);
    }

    const uint8_t* far;
};

// Tiles of which somebody says what comes next: each for itself, since its neighbour may have none of
// the tokens.
struct Told {
    template <class>
    static constexpr int tiles() {
        return 1;
    }

    Told operator+(size_t bytes) const { return {{ahead.near + bytes, ahead.far + bytes}}; }

    void fetch(const uint8_t*) const {
        __builtin_prefetch(ahead.far, 0, 2);
        __builtin_prefetch(ahead.near);
    }

    TilesAhead ahead;
};

// `HeadTile<bits>` has kSliceBytes, kMostTiles (that it takes at once), `arrange` (16 query codes in its
// order) and `run<heads, Ahead>`. What is far ahead comes in the order of memory, a beat for each beat:
// tiles at once fetched each for itself take half the rate from memory.
template <template <int> class HeadTile, int kHeadsAtOnce>
struct TileHeads {
    static_assert(kHeadsAtOnce == 4);

    static int slice_bytes(const Shape& shape) {
        return shape.code_bits == 8   ? HeadTile<8>::kSliceBytes
               : shape.code_bits == 4 ? HeadTile<4>::kSliceBytes
                                      : HeadTile<2>::kSliceBytes;
    }

    static size_t arranged_bytes(const Shape& shape) {
        return size_t(shape.rows()) * shape.slices() * slice_bytes(shape);
    }

    static void arrange(const Shape& shape, const int8_t* codes, int8_t* out) {
        const auto arrange_slice = shape.code_bits == 8   ? HeadTile<8>::arrange
                                   : shape.code_bits == 4 ? HeadTile<4>::arrange
                                                          : HeadTile<2>::arrange;
        const int slices = shape.rows() * shape.slices();
        for (int slice = 0; slice < slices; ++slice) {
            arrange_slice(codes + slice * 16, out + slice * slice_bytes(shape));
        }
    }

    static int tiles_at_once(const Shape& shape) {
        return shape.code_bits == 8   ? HeadTile<8>::kMostTiles
               : shape.code_bits == 4 ? HeadTile<4>::kMostTiles
                                      : HeadTile<2>::kMostTiles;
    }

    static void tiles(const Shape& shape, const uint8_t* beats, const int8_t* arranged,
                      int32_t* products) {
        some_tiles(shape, beats, arranged, products, Streamed{beats + kFarAhead});
    }

    static void tiles(const Shape& shape, const uint8_t* beats, const int8_t* arranged,
                      int32_t* products, TilesAhead ahead) {
        some_tiles(shape, beats, arranged, products, Told{ahead});
    }

private:
    template <class Ahead>
    static void some_tiles(const Shape& shape, const uint8_t* beats, const int8_t* arranged,
                           int32_t* products, Ahead ahead) {
        switch (shape.code_bits) {
            case 8: return all_heads<HeadTile<8>>(shape, beats, ahead, arranged, products);
            case 4: return all_heads<HeadTile<4>>(shape, beats, ahead, arranged, products);
            default: return all_heads<HeadTile<2>>(shape, beats, ahead, arranged, products);
        }
    }

    template <class Kernel, class Ahead>
    static void all_heads(const Shape& shape, const uint8_t* beats, Ahead ahead,
                          const int8_t* arranged, int32_t* products) {
        const int slices = shape.slices();
        const size_t bytes = shape.tile_bytes();
        const size_t stride = size_t(slices) * Kernel::kSliceBytes;
        for (int head = 0; head < shape.kv_heads; ++head) {
            for (int first = 0; first < shape.heads; first += kHeadsAtOnce) {
                switch (shape.heads - first) {
                    case 1:
                        Kernel::template run<1>(beats, ahead, bytes, slices, arranged, stride,
                                                  products);
                        break;
                    case 2:
                        Kernel::template run<2>(beats, ahead, bytes, slices, arranged, stride,
                                                  products);
                        break;
                    case 3:
                        Kernel::template run<3>(beats, ahead, bytes, slices, arranged, stride,
                                                  products);
                        break;
                    default:
                        Kernel::template run<4>(beats, ahead, bytes, slices, arranged, stride,
                                                  products);
                }
                const int done =
                    shape.heads - first < kHeadsAtOnce ? shape.heads - first : kHeadsAtOnce;
                arranged += done * stride;
                products += done * kGroupTokens;
            }
            beats += size_t(slices) * hillinfer::kBeatBytes;
            ahead = ahead + size_t(slices) * Ahead::template tiles<Kernel>() * hillinfer::kBeatBytes;
        }
    }
};

}  // namespace
