// SPDX-License-Identifier: Apache-2.0
#include "choice.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "selection.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

// Looked at as bits: the compiler is told that no number is infinite.
bool all_finite(const std::vector<float>& values) {
    constexpr uint32_t kExponent = 0x7F800000;
    bool finite = true;
    for (const float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        finite &= (bits & kExponent) != kExponent;
    }
    return finite;
}

std::vector<float> scaled_query(const Shape& shape, const Choice& choice) {
    const int dim = shape.head_dim;
    std::vector<float> scaled(size_t(shape.rows()) * dim);
    if (shape.rule == kWeightSum) {
        for (int row = 0; row < shape.rows(); ++row) {
            const float* own = choice.query + row * choice.head_stride;
            for (int i = 0; i < dim; ++i) {
                scaled[size_t(row) * dim + i] = own[i] * choice.factor;
            }
        }
        return scaled;
    }
    for (int head = 0; head < shape.kv_heads; ++head) {
        const float* first = choice.query + head * choice.group_size * choice.head_stride;
        for (int i = 0; i < dim; ++i) {
            // Sums of many do round, so the order is part of the contract.
            double total = first[i];
            for (int64_t member = 1; member < choice.group_size; ++member) {
                total += double(first[member * choice.head_stride + i]);
            }
            scaled[size_t(head) * dim + i] = float(total) * choice.factor;
        }
    }
    return scaled;
}

int64_t* count_up(int64_t first, int64_t stop, int64_t* out) {
    for (int64_t i = first; i < stop; ++i) {
        *out++ = i;
    }
    return out;
}

}  // namespace

bool choose(const Kernels& kernels, const Sequence& sequence, const Choice& choice, int64_t* out) {
    const std::vector<float> scaled = scaled_query(sequence.shape, choice);
    if (!all_finite(scaled)) {
        return false;
    }
    Sequence scoring = sequence;
    scoring.scaled = scaled.data();
    int64_t tokens = 0;
    for (int64_t i = 0; i < sequence.segment_count; ++i) {
        tokens += sequence.segments[i].tokens;
    }
    const int64_t shadow_bytes = tokens * int64_t(sequence.shape.group_bytes()) / kGroupTokens;
    scoring.threads = threads_for(shadow_bytes, sequence.threads);
    const int64_t length = tokens + sequence.coming;
    const int64_t head = std::min<int64_t>(choice.sinks, length);
    const int64_t tail = std::max(length - choice.recent, head);
    const int64_t best = choice.count - head - (length - tail);
    const int sets = sequence.shape.sets();
    const std::unique_ptr<uint32_t[]> tuples(new uint32_t[size_t(sets) * size_t(tokens)]);
    score_sequence(kernels, scoring, tuples.get());
    run_parallel(scoring.threads, sets, [&](int64_t set, int) {
        int64_t* own = count_up(0, head, out + set * choice.count);
        own = select_best(tuples.get() + set * tokens, head, tail, best, own);
        count_up(tail, length, own);
    });
    return true;
}

}  // namespace hillinfer
