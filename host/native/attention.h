// SPDX-License-Identifier: Apache-2.0
// Exact softmax attention of one token's queries over rows where they lie.
//
// Rows come in tiles: scores of a tile's rows, then the softmax is continued by them, then their
// values are added up. A chunk of tiles starts a softmax of its own, and chunks are merged in
// their order. Tiles and chunks are counted from the first row on, so bits depend on the rows'
// values and order alone: not on threads, addresses or how many calls brought them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "prompt_attention.h"

namespace hillinfer {

constexpr int kTileRows = 64;
constexpr int kChunkRows = 8 * kTileRows;
// Query heads that share a KV head, at most.
constexpr int kMostHeads = 128;

enum StoredType : int32_t { kBfloat16 = 0, kFloat16 = 1 };

// Shared with Python: the order and types of these fields are part of the C interface.
struct Attention {
    const float* query;  // query_heads * head_dim.
    int32_t kv_heads;
    int32_t group_size;
    int32_t head_dim;
    int32_t stored_type;
    float scaling;
    int32_t threads;

    int query_heads() const { return kv_heads * group_size; }
    // Floats of a query head in working memory: whole vectors of any instruction set.
    int padded_dim() const { return (head_dim + 31) / 32 * 32; }
    size_t head_bytes() const { return size_t(head_dim) * 2; }
    // From a row's start to its values.
    size_t values_start() const { return kv_heads * head_bytes(); }
};

// Rows that the KV heads of one set attend to; sets share out the KV heads evenly, in order.
struct RowSet {
    const uint64_t* rows;  // Addresses.
    int64_t count;
};

// Softmax over some rows, of some query heads: the largest score, the sum of weights relative to
// it, and the sum of weighted values.
struct Partial {
    float* largest;
    float* sums;
    float* outputs;  // padded_dim of each.

    Partial from(int query_head, int padded_dim) const {
        return {largest + query_head, sums + query_head, outputs + size_t(query_head) * padded_dim};
    }
};

// KV heads that are worked on together.
struct HeadRange {
    int first;
    int count;
};

// What each instruction set provides.
struct AttentionKernels {
    // Continues the softmax of a range's query heads (`partial` is theirs) by rows; `query` is
    // the range's, padded_dim of each head, items in their places.
    void (*add_rows)(const Attention&, const float* query, HeadRange, const uint64_t* rows,
                     int64_t count, const Partial&);
    // Adds `other`, of `heads` query heads, to `into`.
    void (*merge)(const Partial& into, const Partial& other, int heads, int padded_dim);
    // Where a head's item lies in the vectors of queries and outputs.
    int (*item_place)(int32_t stored_type, int item);
    uint64_t (*read_rows)(const uint64_t* rows, int64_t count, int64_t row_bytes);
    // Scaled inner products of keys at the rows' start, out[head * stride + row]; `query` as above.
    void (*score_rows)(const Attention&, const float* query, HeadRange, const uint64_t* rows,
                       int64_t count, float* out, int64_t stride);
    // Adds values at the rows' start, by weights[head * stride + row], to the range's outputs,
    // padded_dim of each head, items in their places.
    void (*weigh_rows)(const Attention&, HeadRange, const uint64_t* rows, int64_t count,
                       const float* weights, int64_t stride, float* outputs);
    PromptKernels prompts;
};

extern const AttentionKernels kPortableAttention;
#if defined(__x86_64__)
extern const AttentionKernels kAvx2Attention;
extern const AttentionKernels kAvx512Attention;
#elif defined(__aarch64__)
extern const AttentionKernels kNeonAttention;
#endif

// Bytes of what a caller keeps between calls, aligned to 64.
size_t attention_state_bytes(const Attention& attention);
void begin_attention(const AttentionKernels& kernels, const Attention& attention, void* state);
// Every call but the last brings whole tiles to each set.
void add_rows(const AttentionKernels& kernels, const Attention& attention, const RowSet* sets,
              int64_t set_count, void* state);
// Output of the rows so far, query_heads * head_dim; more rows may follow.
void attention_result(const AttentionKernels& kernels, const Attention& attention,
                      const void* state, float* out);
// Output of sets of rows, all here, at least one of each.
void attend(const AttentionKernels& kernels, const Attention& attention,
            const std::vector<RowSet>& sets, float* out);

// What comes of a set, `first` to `stop` - 1 of its `count` rows; those before came in earlier runs.
struct ComingSet {
    const int32_t* numbers;  // Which of the addresses each of its rows has; null where they are the same.
    int64_t first;
    int64_t stop;
    int64_t count;

    int64_t number(int64_t row) const { return numbers ? numbers[row] : row; }
    // Rows that are attended to in whole tiles, or with the set's last one.
    int64_t tiled(int64_t rows) const { return rows == count ? rows : rows / kTileRows * kTileRows; }
};

// Rows of each set that follow those a state has, and come while others are attended to. Every chunk
// has a softmax of its own that takes its tiles in order, so bits depend neither on when a row comes
// nor on how many come together.
class ComingRows {
public:
    // `addresses` are 0 for a row that is not here; whoever brings one writes its address, from any
    // thread. What a set has of a tile that is not whole is kept for the rows that follow, in `kept`:
    // kTileRows - 1 rows that stay until these have come. It is not looked at where tiles are whole.
    ComingRows(const AttentionKernels& kernels, const Attention& attention, void* state,
               const uint64_t* addresses, std::vector<ComingSet> sets, uint8_t* kept);
    ComingRows(ComingRows&&) = default;

    // Attends to those tiles of each chunk that are here, up to the first that is not.
    void advance();

    // Adds the rows to the state, which was as before until now; false, and nothing is done, where
    // some are not attended to.
    bool end();

private:
    struct Chunk {
        int set;
        int64_t first;  // Of the set's rows.
        int64_t count;
        int64_t done;
        Partial partial;
    };

    uint64_t address(const ComingSet& set, int64_t row) const;
    int64_t ready(const Chunk& chunk) const;
    const uint64_t* in_order(const Chunk& chunk, int64_t count, uint64_t* memory) const;
    bool are_here(const ComingSet& set, int64_t first) const;
    void keep(int number);

    const AttentionKernels* kernels_;
    const Attention* attention_;
    void* state_;
    const uint64_t* addresses_;
    std::vector<ComingSet> sets_;
    uint8_t* kept_;
    int set_kv_heads_;
    std::vector<Chunk> chunks_;
    std::unique_ptr<float[]> memory_;
};

// For rows that are keys alone: out[head * stride + row] of every query head.
void inner_products(const AttentionKernels& kernels, const Attention& attention,
                    const uint64_t* rows, int64_t count, float* out, int64_t stride);
// For rows that are values alone: their sum by weights[head * stride + row], added to `out`,
// query_heads * head_dim.
void weighted_sum(const AttentionKernels& kernels, const Attention& attention,
                  const uint64_t* rows, int64_t count, const float* weights, int64_t stride,
                  float* out);

}  // namespace hillinfer
