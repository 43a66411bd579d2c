// SPDX-License-Identifier: Apache-2.0
// The newest tokens of several sequences in one layer: their rows are stored, tokens are chosen for
// each and attended to, a row of the batch in each thread. A row gets the bits that it gets alone.
#pragma once
#include <cstdint>

#include "coded_step.h"
#include "decode_step.h"
#include "thread_pool.h"

namespace hillinfer {

// Numbers of a batch as the model made them: where a row's heads lie. Shared with Python, as below.
struct RowStates {
    const void* numbers;
    int64_t row_stride;   // From one row of the batch to the next, in numbers.
    int64_t head_stride;  // From one head to the next.
    int64_t number_type;
};

// One sequence, which a whole step is asked for alike.
struct StepRow {
    LayerTable* tables;  // Of its first layer; the others follow.
    int64_t row;         // Of the batch.
    SelectedSets* selected;
    Misses* misses;
    SplitSelection* split;  // Instead of `selected`, where some of its tokens are coded; else null.
    int32_t is_left_out;  // Of the next call.
    int32_t outcome;      // Of the last one.
    DecodeStep step;
};

// What a layer is asked for.
struct StepRows {
    StepRow* rows;
    int64_t count;
    int64_t layer;
    int32_t variant;
    int32_t threads;
    float predicted_factor;  // As in `Choice`, of the predicted query.
    RowStates query;      // Attends, and chooses where nothing was predicted.
    RowStates predicted;  // Chooses among the tokens before this step's; null where nothing was.
    float* out;           // (batch, query heads, head_dim)
};

// Tells a row's step where its query lies.
void ask(DecodeStep& step, const RowStates& states, int64_t row);

// Chooses for the newest token of a row, which is stored: by the predicted query, where there is one, as
// before it was. `exact` as in `choose_tokens`; false where the query is not finite.
bool choose_of(StepRow& own, LayerTable& table, const StepRows& asked, int64_t* sets,
               int64_t* exact);

// Does something for each row, a row in each thread; where rows are few each of them gets all threads,
// one row after the other.
template <class Act>
void for_each_row(const StepRows& asked, const Act& act) {
    const bool is_row_a_thread = asked.count >= asked.threads;
    const int at_once = is_row_a_thread ? asked.threads : 1;
    const int own_threads = is_row_a_thread ? 1 : asked.threads;
    run_parallel(at_once, asked.count, [&](int64_t number, int) {
        StepRow& own = asked.rows[number];
        if (!own.is_left_out) {
            own.step.threads = own_threads;
            act(own);
        }
    });
}

}  // namespace hillinfer
