// SPDX-License-Identifier: Apache-2.0
// Products in plain C++, for any machine.
#include "group_scores.h"

namespace {

struct PortableProducts : NearWeights {
    static constexpr int32_t zero_code(int) { return 0; }

    static size_t arranged_bytes(const Shape& shape) {
        return size_t(shape.rows()) * shape.padded_dim;
    }

    static void arrange(const Shape& shape, const int8_t* codes, int8_t* out) {
        std::memcpy(out, codes, arranged_bytes(shape));
    }

    template <int kBits>
    static void unpack(const uint8_t* piece, int8_t* out) {
        for (int i = 0; i < 16; ++i) {
            const int place = i * kBits % 8;
            // The code at the top of a byte is an int8 whose shift extends its sign.
            out[i] = int8_t(int8_t(uint8_t(piece[i * kBits / 8] << (8 - kBits - place))) >>
                            (8 - kBits));
        }
    }

    template <int kBits>
    static void head_tile(const Shape& shape, const uint8_t* beats, const int8_t* query,
                          int32_t* products) {
        constexpr int kTokens = 32 / kBits;
        alignas(64) int8_t key[256];
        for (int token = 0; token < kTokens; ++token) {
            for (int slice = 0; slice < shape.slices(); ++slice) {
                unpack<kBits>(beats + size_t(slice) * 64 + token * 2 * kBits, key + slice * 16);
            }
            for (int head = 0; head < shape.heads; ++head) {
                const int8_t* own = query + size_t(head) * shape.padded_dim;
                int32_t sum = 0;
                for (int i = 0; i < shape.padded_dim; ++i) {
                    sum += int32_t(own[i]) * key[i];
                }
                products[head * kGroupTokens + token] = sum;
            }
        }
    }

    static int tiles_at_once(const Shape&) { return 1; }

    static void tiles(const Shape& shape, const uint8_t* tile, const int8_t* arranged,
                      int32_t* products, TilesAhead = {}) {
        const auto head_tile_of = shape.code_bits == 8   ? head_tile<8>
                                  : shape.code_bits == 4 ? head_tile<4>
                                                         : head_tile<2>;
        for (int head = 0; head < shape.kv_heads; ++head) {
            const size_t row = size_t(head) * shape.heads;
            head_tile_of(shape, tile + size_t(head) * shape.slices() * 64,
                         arranged + row * shape.padded_dim, products + row * kGroupTokens);
        }
    }
};

}  // namespace

namespace hillinfer {
const Kernels kPortable = kernels_of<PortableProducts>("portable");
}
