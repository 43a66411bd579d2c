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
bool all_finite(const float* values, size_t count) {
    constexpr uint32_t kExponent = 0x7F800000;
    bool finite = true;
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        finite &= (bits & kExponent) != kExponent;
    }
    return finite;
}

int64_t* count_up(int64_t first, int64_t stop, int64_t* out) {
    for (int64_t i = first; i < stop; ++i) {
        *out++ = i;
    }
    return out;
}

// Where the first kept tokens of so many end, and where the last ones begin.
struct Kept {
    int64_t head, tail;
};

Kept kept_of(int64_t length, const Quota& quota) {
    const int64_t head = std::min<int64_t>(quota.sinks, length);
    return {head, std::max(length - quota.recent, head)};
}

// Writes the best `count` of a selected set, the kept ones among them: they are looked for among what is
// selected alone.
void select_exact(const uint32_t* tuples, int64_t tokens, const Quota& quota, int64_t count,
                  const int64_t* selected, int64_t* out) {
    const int64_t length = tokens + quota.coming;
    const auto [head, tail] = kept_of(length, quota);
    const int64_t kept = head + (length - tail), others = quota.count - kept;
    std::vector<uint32_t> own(static_cast<size_t>(others));
    for (int64_t i = 0; i < others; ++i) {
        own[size_t(i)] = tuples[selected[head + i]];
    }
    int64_t* const first = count_up(0, head, out);
    int64_t* const stop = select_best(own.data(), 0, others, count - kept, first);
    for (int64_t* place = first; place < stop; ++place) {
        *place = selected[head + *place];
    }
    count_up(tail, length, stop);
}

}  // namespace

bool scale_query(const Shape& shape, const Choice& choice, float* out) {
    const int dim = shape.head_dim;
    const size_t numbers = size_t(shape.rows()) * dim;
    if (shape.rule == kWeightSum) {
        for (int row = 0; row < shape.rows(); ++row) {
            const float* own = choice.query + row * choice.head_stride;
            for (int i = 0; i < dim; ++i) {
                out[size_t(row) * dim + i] = own[i] * choice.factor;
            }
        }
        return all_finite(out, numbers);
    }
    for (int head = 0; head < shape.kv_heads; ++head) {
        const float* first = choice.query + head * choice.group_size * choice.head_stride;
        for (int i = 0; i < dim; ++i) {
            // Sums of many do round, so the order is part of the contract.
            double total = first[i];
            for (int64_t member = 1; member < choice.group_size; ++member) {
                total += double(first[member * choice.head_stride + i]);
            }
            out[size_t(head) * dim + i] = float(total) * choice.factor;
        }
    }
    return all_finite(out, numbers);
}

void select_sets(const uint32_t* tuples, int64_t sets, int64_t tokens, const Quota& quota,
                 int threads, int64_t* out) {
    const int64_t length = tokens + quota.coming;
    const Kept kept = kept_of(length, quota);
    const int64_t head = kept.head, tail = kept.tail;
    const int64_t best = quota.count - head - (length - tail);
    run_parallel(threads, sets, [&](int64_t set, int) {
        int64_t* own = count_up(0, head, out + set * quota.count);
        own = select_best(tuples + set * tokens, head, tail, best, own);
        count_up(tail, length, own);
    });
}

bool choose(const Kernels& kernels, const Sequence& sequence, const Choice& choice, int64_t* out,
            int64_t exact_count, int64_t* exact, int32_t* products) {
    const Shape& shape = sequence.shape;
    std::vector<float> scaled(size_t(shape.rows()) * shape.head_dim);
    if (!scale_query(shape, choice, scaled.data())) {
        return false;
    }
    Sequence scoring = sequence;
    scoring.scaled = scaled.data();
    int64_t tokens = 0;
    for (int64_t i = 0; i < sequence.segment_count; ++i) {
        tokens += sequence.segments[i].tokens;
    }
    scoring.threads = scoring_threads(kernels, shape, tokens, sequence.threads);
    const int sets = shape.sets();
    const std::unique_ptr<uint32_t[]> tuples(new uint32_t[size_t(sets) * size_t(tokens)]);
    score_sequence(kernels, scoring, tuples.get(), products);
    const Quota quota{sequence.coming, choice.sinks, choice.recent, choice.count};
    select_sets(tuples.get(), sets, tokens, quota, scoring.threads, out);
    for (int64_t set = 0; exact && set < sets; ++set) {
        select_exact(tuples.get() + set * tokens, tokens, quota, exact_count, out + set * quota.count,
                     exact + set * exact_count);
    }
    return true;
}

}  // namespace hillinfer
