// SPDX-License-Identifier: Apache-2.0
// Rows to and from blocks: a group of 64 tokens at a time, which stays in the processor's cache
// between its checksum and its block.
#include "block_rows.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "api.h"
#include "crc32c.h"
#include "file_reads.h"

namespace hillinfer {
namespace {

constexpr int64_t kGroup = 64;
constexpr int64_t kTile = 8;

// Eight lines of eight items become eight others; both strides are in bytes.
inline void transpose_tile(const uint8_t* from, int64_t from_bytes, uint8_t* to, int64_t to_bytes,
                           uint16_t) {
#if defined(__SSE2__)
    __m128i a[kTile], b[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
        a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_bytes));
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        a[4 * i] = _mm_unpacklo_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm_unpackhi_epi32(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm_unpacklo_epi32(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm_unpackhi_epi32(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm_unpacklo_epi64(a[i], a[4 + i]);
        b[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[4 + i]);
    }
    for (int64_t i = 0; i < kTile; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_bytes), b[i]);
    }
#else
    uint16_t lines[kTile][kTile];
    for (int64_t i = 0; i < kTile; ++i) std::memcpy(lines[i], from + i * from_bytes, sizeof lines[i]);
    for (int64_t j = 0; j < kTile; ++j) {
        uint16_t line[kTile];
        for (int64_t i = 0; i < kTile; ++i) line[i] = lines[i][j];
        std::memcpy(to + j * to_bytes, line, sizeof line);
    }
#endif
}

inline void transpose_tile(const uint8_t* from, int64_t from_bytes, uint8_t* to, int64_t to_bytes,
                           uint32_t) {
    for (int64_t j = 0; j < kTile; ++j) {
        for (int64_t i = 0; i < kTile; ++i) {
            std::memcpy(to + j * to_bytes + i * 4, from + i * from_bytes + j * 4, 4);
        }
    }
}

// `lines` of `width` items become `width` lines of `lines` items.
template <class Item>
void transpose(const uint8_t* from, int64_t from_bytes, int64_t lines, int64_t width, uint8_t* to,
               int64_t to_bytes) {
    constexpr int64_t item = sizeof(Item);
    const int64_t whole_lines = lines / kTile * kTile, whole_width = width / kTile * kTile;
    // A line of the outcome is written to its end before the next begins.
    for (int64_t j = 0; j < whole_width; j += kTile) {
        for (int64_t i = 0; i < whole_lines; i += kTile) {
            transpose_tile(from + i * from_bytes + j * item, from_bytes,
                           to + j * to_bytes + i * item, to_bytes, Item());
        }
    }
    for (int64_t j = 0; j < width; ++j) {
        for (int64_t i = j < whole_width ? whole_lines : 0; i < lines; ++i) {
            std::memcpy(to + j * to_bytes + i * item, from + i * from_bytes + j * item, item);
        }
    }
}

enum class Way { kToBlocks, kFromBlocks };

constexpr int64_t kLine = 64;

inline bool is_lines(const void* address, int64_t bytes) {
    return (reinterpret_cast<uintptr_t>(address) | uintptr_t(bytes)) % kLine == 0;
}

// Whole lines go to memory past the cache: a store that takes a line into it reads the line first,
// and whoever computes comes to it much later.
inline void stream_lines(uint8_t* to, const uint8_t* from, int64_t bytes) {
#if defined(__SSE2__)
    for (int64_t at = 0; at < bytes; at += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
    }
#else
    std::memcpy(to, from, size_t(bytes));
#endif
}

// What was streamed is seen by others before whatever this thread does next.
inline void end_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// As `transpose`, for the lines of a group: eight are made in the cache, and leave it at once.
template <class Item>
void transpose_group(const uint8_t* from, int64_t from_bytes, int64_t width, uint8_t* to,
                     int64_t to_bytes) {
    alignas(kLine) uint8_t made[kTile * kGroup * sizeof(Item)];
    constexpr int64_t bytes = kGroup * sizeof(Item);
    for (int64_t j = 0; j < width; j += kTile) {
        transpose<Item>(from + j * int64_t(sizeof(Item)), from_bytes, kGroup, kTile, made, bytes);
        for (int64_t i = 0; i < kTile; ++i) {
            stream_lines(to + (j + i) * to_bytes, made + i * bytes, bytes);
        }
    }
}

template <Way kWay>
void copy(uint8_t* row, uint8_t* block, int64_t bytes) {
    if constexpr (kWay == Way::kToBlocks) {
        std::memcpy(block, row, size_t(bytes));
    } else {
        std::memcpy(row, block, size_t(bytes));
    }
}

// Moves tokens of one block; `rows` is where the first of them has its row, and `at` its place in
// the block.
template <Way kWay, class Item>
void move_part(const BlockRows& given, uint8_t* rows, int64_t tokens, uint8_t* block, int64_t at) {
    constexpr int64_t item = sizeof(Item);
    const int64_t dim = given.head_dim, half = given.block_tokens * dim;
    const int64_t head_bytes = dim * item, line_bytes = given.block_tokens * item;
    for (int64_t head = 0; head < given.kv_heads; ++head) {
        uint8_t* const own = block + head * 2 * half * item;
        uint8_t* const keys = rows + head * head_bytes;
        uint8_t* const values = keys + given.kv_heads * head_bytes;
        if (given.order != nullptr) {
            for (int64_t token = 0; token < tokens; ++token) {
                const int32_t* const places = given.order + (at + token) * dim;
                for (int64_t i = 0; i < dim; ++i) {
                    const int64_t row = token * given.row_bytes + i * item;
                    copy<kWay>(keys + row, own + places[i] * item, item);
                    copy<kWay>(values + row, own + places[half + i] * item, item);
                }
            }
            continue;
        }
        uint8_t* const columns = own + at * item;
        if constexpr (kWay == Way::kToBlocks) {
            if (tokens == kGroup && dim % kTile == 0 && is_lines(columns, line_bytes)) {
                transpose_group<Item>(keys, given.row_bytes, dim, columns, line_bytes);
            } else {
                transpose<Item>(keys, given.row_bytes, tokens, dim, columns, line_bytes);
            }
        } else {
            transpose<Item>(columns, line_bytes, dim, tokens, keys, given.row_bytes);
        }
        uint8_t* const lines = own + (half + at * dim) * item;
        if constexpr (kWay == Way::kToBlocks) {
            if (is_lines(lines, head_bytes)) {
                for (int64_t token = 0; token < tokens; ++token) {
                    stream_lines(lines + token * head_bytes, values + token * given.row_bytes,
                                 head_bytes);
                }
                continue;
            }
        }
        for (int64_t token = 0; token < tokens; ++token) {
            copy<kWay>(values + token * given.row_bytes, lines + token * head_bytes, head_bytes);
        }
    }
}

// Moves tokens of a prompt from position `first` up to `stop`, block by block.
template <Way kWay, class Item>
void move_tokens(const BlockRows& given, int64_t first, int64_t stop) {
    const int64_t size = given.block_tokens;
    while (first < stop) {
        const int64_t number = first / size, end = std::min(stop, (number + 1) * size);
        uint8_t* const rows = given.rows + (first - given.position) * given.row_bytes;
        uint8_t* const block = given.blocks + given.numbers[number] * given.block_bytes;
        move_part<kWay, Item>(given, rows, end - first, block, first % size);
        first = end;
    }
}

template <Way kWay>
void move(const BlockRows& given, int64_t first, int64_t stop) {
    if (given.item_bytes == 2) {
        move_tokens<kWay, uint16_t>(given, first, stop);
    } else {
        move_tokens<kWay, uint32_t>(given, first, stop);
    }
}

void rows_to_blocks(const BlockRows& given) {
    for (int64_t at = 0; at < given.tokens; at += kGroup) {
        const int64_t count = std::min(kGroup, given.tokens - at);
        if (given.salts != nullptr) {
            const int64_t group = at / kGroup;
            given.sums[group] = crc32c(given.salts[group], given.rows + at * given.row_bytes,
                                       count * given.row_bytes);
        }
        const int64_t start = given.position + at;
        move<Way::kToBlocks>(given, std::max(start, given.first),
                             std::min(start + count, given.stop));
    }
    end_streams();
}

// Rows of a read are placed by the thread that read them. Nobody needs them afterwards, so a thread
// reads again and again into memory of one of the longest reads, which stays in the cache. Where
// there are fewer of those than threads, each read has its own memory.
class Placing final : public Arrivals {
public:
    Placing(const FileReads& reads, BlockRows* rows, int64_t threads) : rows_(rows) {
        const int64_t longest = *std::max_element(reads.byte_counts, reads.byte_counts + reads.count);
        const int64_t workers = std::min(std::max<int64_t>(threads, 1), reads.count);
        int64_t found = 0;
        for (int64_t i = 0; i < reads.count && found < std::min(workers, kMost); ++i) {
            if (reads.byte_counts[i] == longest) {
                memory_[found++] = reads.addresses[i];
            }
        }
        has_memory_ = found == workers;
    }

    uint64_t address(const FileReads& reads, int64_t read, int64_t worker) override {
        const uint64_t own = has_memory_ ? memory_[worker] : reads.addresses[read];
        rows_[read].rows = reinterpret_cast<uint8_t*>(own);
        return own;
    }

    void came(int64_t read) noexcept override { rows_to_blocks(rows_[read]); }

private:
    static constexpr int64_t kMost = 16;

    BlockRows* const rows_;
    uint64_t memory_[kMost] = {};
    bool has_memory_ = false;
};

}  // namespace
}  // namespace hillinfer

HILLINFER_API void hillinfer_rows_to_blocks(const hillinfer::BlockRows* given) {
    hillinfer::rows_to_blocks(*given);
}

HILLINFER_API int32_t hillinfer_read_to_blocks(const hillinfer::ReadWay* way,
                                               const hillinfer::FileReads* reads,
                                               hillinfer::BlockRows* rows) {
    if (reads->count == 0) return hillinfer::kDone;
    // Memory that threads read into again is that of single reads.
    hillinfer::ReadWay singly = *way;
    singly.joined_bytes = 0;
    hillinfer::Placing placing(*reads, rows, singly.threads);
    return hillinfer::read_file(singly, *reads, &placing) ? hillinfer::kDone : hillinfer::kLost;
}

HILLINFER_API void hillinfer_rows_from_blocks(const hillinfer::BlockRows* given) {
    using namespace hillinfer;
    move<Way::kFromBlocks>(*given, given->first, given->stop);
}
