// SPDX-License-Identifier: Apache-2.0
#include "offsets.h"

#include <algorithm>

#include "contract.h"
#include "thread_pool.h"

namespace hillinfer {

OffsetTokens::OffsetTokens(int64_t all)
    : recent(std::max<int64_t>(all - kRecent, 0)),
      sinks(std::min(kSinks, recent)),
      probes(recent > kStride ? (recent - 1) / kStride : 0) {}

int64_t OffsetTokens::place(int64_t position, int64_t tokens) const {
    if (position >= recent) {
        return sinks + position - recent;
    }
    if (position < sinks) {
        return position;
    }
    return position % kStride == 0 ? once(tokens) + position / kStride - 1 : -1;
}

OffsetSample::OffsetSample(const Shape& shape, int64_t tokens, int64_t coming)
    : tokens(tokens),
      where(tokens + coming),
      count(where.all(tokens)),
      log_weights(size_t(shape.rows()) * size_t(count)),
      invalid(size_t(shape.kv_heads) * size_t(count)) {}

namespace {

int32_t mean_of_sums(const OffsetSample& sample, int first_row, int rows, int first_head,
                     int heads) {
    int64_t total = 0;
    int64_t counted = 0;
    for (int64_t i = 0; i < sample.count; ++i) {
        bool valid = true;
        for (int head = first_head; head < first_head + heads; ++head) {
            valid = valid && !sample.invalid[size_t(head) * sample.count + i];
        }
        if (!valid) {
            continue;
        }
        ++counted;
        for (int row = first_row; row < first_row + rows; ++row) {
            total += sample.log_weights[size_t(row) * sample.count + i];
        }
    }
    return int32_t(floor_divide(total, counted ? counted : 1));
}

}  // namespace

std::vector<int32_t> sequence_offsets(const Kernels& kernels, const Shape& shape,
                                      const OffsetSample& sample, int threads) {
    if (shape.rule == kRawSum) {
        std::vector<int32_t> offsets(size_t(shape.sets()));
        const int heads = shape.kv_heads / shape.sets();
        run_parallel(threads, shape.sets(), [&](int64_t set, int) {
            const int first = int(set) * heads;
            offsets[size_t(set)] =
                mean_of_sums(sample, first * shape.heads, heads * shape.heads, first, heads);
        });
        return offsets;
    }
    std::vector<int32_t> offsets(size_t(shape.rows()));
    const int64_t once = sample.where.once(sample.tokens);
    run_parallel(threads, shape.rows(), [&](int64_t row, int) {
        offsets[size_t(row)] = kernels.log_sum(
            sample.log_weights.data() + row * sample.count,
            sample.invalid.data() + row / shape.heads * sample.count, sample.count, once, kStride);
    });
    return offsets;
}

}  // namespace hillinfer
