// SPDX-License-Identifier: Apache-2.0
// Chooses tokens: from a query as the model made it to the selected sets (scoring contract, sections
// 4 to 8).
#pragma once
#include "sequence.h"

namespace hillinfer {

// A query, and how much is selected for it; Python fills it in.
struct Choice {
    const float* query;   // Query heads * head_dim.
    int64_t head_stride;  // From one head to the next, in numbers.
    int64_t group_size;   // Query heads of a KV head.
    float factor;         // Scaling in units of log2, of section 4.
    int32_t sinks;        // How many of the first tokens are kept, whatever their score,
    int64_t recent;       // and how many of the newest, a coming one among them.
    int64_t count;        // Selected tokens of a set, the kept ones included.
};

// How much is selected of tuples that are there already.
struct Quota {
    int32_t coming;  // Tokens behind the last tuple, selected without one.
    int32_t sinks;   // As in `Choice`, and
    int64_t recent;
    int64_t count;   // of all, the coming one among them.
};

// Writes the scaled query of section 4, rows * head_dim; false where it is not finite.
bool scale_query(const Shape& shape, const Choice& choice, float* out);

// Writes the sets of `sets` times `tokens` tuples, one behind the other, as `choose` does.
void select_sets(const uint32_t* tuples, int64_t sets, int64_t tokens, const Quota& quota,
                 int threads, int64_t* out);

// Writes the sets one behind the other, `count` ascending positions each; a coming token is the last
// of each set. `scaled` of the sequence is not looked at; its N is at least `count`, and that at
// least the kept ones. Where `exact` is given it gets the best `exact_count` of each set likewise, and
// `products` those of `score_sequence`. False, and nothing written, where the scaled query is not finite.
bool choose(const Kernels& kernels, const Sequence& sequence, const Choice& choice, int64_t* out,
            int64_t exact_count = 0, int64_t* exact = nullptr, int32_t* products = nullptr);

}  // namespace hillinfer
