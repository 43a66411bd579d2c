// SPDX-License-Identifier: Apache-2.0
// The two halves of attention by themselves, for those that keep keys and values apart.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

// Of a row's keys that are worked on together.
constexpr size_t kRangeBytes = 2048;

// Query heads' items in the places that the vectors have them in.
std::vector<float> placed_query(const AttentionKernels& kernels, const Attention& attention) {
    std::vector<float> placed(size_t(attention.query_heads()) * attention.padded_dim());
    for (int head = 0; head < attention.query_heads(); ++head) {
        const float* from = attention.query + size_t(head) * attention.head_dim;
        float* to = placed.data() + size_t(head) * attention.padded_dim();
        for (int item = 0; item < attention.head_dim; ++item) {
            to[kernels.item_place(attention.stored_type, item)] = from[item];
        }
    }
    return placed;
}

}  // namespace

void inner_products(const AttentionKernels& kernels, const Attention& attention,
                    const uint64_t* rows, int64_t count, float* out, int64_t stride) {
    const std::vector<float> query = placed_query(kernels, attention);
    const int range_heads =
        std::clamp<int>(int(std::min<size_t>(kRangeBytes / attention.head_bytes(),
                                             kMostHeads / attention.group_size)),
                        1, attention.kv_heads);
    run_parallel(attention.threads, (count + kChunkRows - 1) / kChunkRows, [&](int64_t item, int) {
        const int64_t first = item * kChunkRows;
        const int64_t own = std::min<int64_t>(kChunkRows, count - first);
        for (int head = 0; head < attention.kv_heads; head += range_heads) {
            const HeadRange range = {head, std::min(range_heads, attention.kv_heads - head)};
            const size_t from = size_t(head) * attention.group_size;
            kernels.score_rows(attention, query.data() + from * attention.padded_dim(), range,
                               rows + first, own, out + int64_t(from) * stride + first, stride);
        }
    });
}

void weighted_sum(const AttentionKernels& kernels, const Attention& attention,
                  const uint64_t* rows, int64_t count, const float* weights, int64_t stride,
                  float* out) {
    const int group = attention.group_size;
    const int padded_dim = attention.padded_dim();
    std::vector<float> sums(size_t(attention.query_heads()) * padded_dim);
    // Every head's sum by one thread: the order of summing is the same for any number of them.
    run_parallel(attention.threads, attention.kv_heads, [&](int64_t head, int) {
        const size_t from = size_t(head) * group;
        kernels.weigh_rows(attention, {int(head), 1}, rows, count, weights + int64_t(from) * stride,
                           stride, sums.data() + from * padded_dim);
    });
    for (int head = 0; head < attention.query_heads(); ++head) {
        for (int item = 0; item < attention.head_dim; ++item) {
            out[size_t(head) * attention.head_dim + item] +=
                sums[size_t(head) * padded_dim + kernels.item_place(attention.stored_type, item)];
        }
    }
}

}  // namespace hillinfer
