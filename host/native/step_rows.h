// SPDX-License-Identifier: Apache-2.0
// The newest tokens of several sequences in one layer: their rows are stored, tokens are chosen for
// each and attended to, a row of the batch in each thread. A row gets the bits that it gets alone.
#pragma once
#include <cstdint>

#include "decode_step.h"

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

}  // namespace hillinfer
