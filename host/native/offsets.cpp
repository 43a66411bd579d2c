// SPDX-License-Identifier: Apache-2.0
#include "offsets.h"

#include <algorithm>

#include "contract.h"

namespace hillinfer {

OffsetTokens::OffsetTokens(int64_t tokens)
    : recent(std::max<int64_t>(tokens - kRecent, 0)),
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

OffsetSample::OffsetSample(const Shape& shape, int64_t tokens)
    : tokens(tokens),
      where(tokens),
      count(where.all(tokens)),
      log_weights(size_t(shape.rows()) * size_t(count)),
      invalid(size_t(shape.kv_heads) * size_t(count)) {}

namespace {

int32_t log_sum(const int32_t* log_weights, const uint8_t* invalid, int64_t count, int64_t once) {
    int32_t top = kLeftOut;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t own = invalid[i] ? kLeftOut : log_weights[i];
        top = own > top ? own : top;
    }
    if (top == kLeftOut) {
        return 0;
    }
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t own = invalid[i] ? kLeftOut : log_weights[i];
        // Z <= 0, so w is at most 2^24 and fits an int32.
        const uint64_t w = uint64_t(int32_t(weight(own - top)));
        total += i < once ? w : w * uint64_t(kStride);
    }
    const int length = 64 - __builtin_clzll(total);
    return top + ((length - 25) << 8) + int32_t(total >> (length - 9) & 255);
}

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

std::vector<int32_t> sequence_offsets(const Shape& shape, const OffsetSample& sample) {
    std::vector<int32_t> offsets;
    if (shape.rule == kRawSum) {
        const int heads = shape.kv_heads / shape.sets();
        for (int set = 0; set < shape.sets(); ++set) {
            offsets.push_back(mean_of_sums(sample, set * heads * shape.heads, heads * shape.heads,
                                           set * heads, heads));
        }
        return offsets;
    }
    const int64_t once = sample.where.once(sample.tokens);
    for (int row = 0; row < shape.rows(); ++row) {
        offsets.push_back(log_sum(sample.log_weights.data() + size_t(row) * sample.count,
                                  sample.invalid.data() +
                                      size_t(row / shape.heads) * sample.count,
                                  sample.count, once));
    }
    return offsets;
}

}  // namespace hillinfer
