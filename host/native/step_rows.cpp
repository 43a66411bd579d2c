// SPDX-License-Identifier: Apache-2.0
#include "step_rows.h"

#include "api.h"

namespace hillinfer {
namespace {

const void* row_of(const RowStates& states, int64_t row) {
    const int64_t size = states.number_type == kFloat32Numbers ? 4 : 2;
    return static_cast<const uint8_t*>(states.numbers) + row * states.row_stride * size;
}

void attend_row(StepRow& own, const PoolTable& pool, const StepRows& asked) {
    LayerTable& table = own.tables[asked.layer];
    DecodeStep& step = own.step;
    ask(step, asked.query, own.row);
    own.misses->count = own.misses->arrived = 0;
    const int64_t numbers = int64_t(step.shape.kv_heads) * step.group_size * step.shape.head_dim;
    bool finite = true;
    Found found = kAllHot;
    own.outcome = guarded([&] {
        finite = choose_of(own, table, asked, own.selected->sets, nullptr);
        if (finite) {
            own.selected->set_rows = step.count;
            join_sets(*own.selected, table.length);
            found = attend_joined(asked.variant, table, pool, step, *own.selected, *own.misses,
                                  asked.out + own.row * numbers);
        }
    });
    if (own.outcome == kDone) {
        own.outcome = finite ? outcome_of(found) : kNotFinite;
    }
}

}  // namespace

void ask(DecodeStep& step, const RowStates& states, int64_t row) {
    step.query = row_of(states, row);
    step.head_stride = states.head_stride;
    step.query_type = int32_t(states.number_type);
}

bool choose_of(StepRow& own, LayerTable& table, const StepRows& asked, int64_t* sets,
               int64_t* exact) {
    const Kernels& kernels = *scoring_kernels(asked.variant);
    if (!asked.predicted.numbers) {
        return choose_tokens(kernels, table, own.step, sets, exact);
    }
    DecodeStep ahead = own.step;
    ahead.factor = asked.predicted_factor;
    ask(ahead, asked.predicted, own.row);
    return choose_before(kernels, table, ahead, sets, exact);
}

}  // namespace hillinfer

using namespace hillinfer;

// Attends for all rows that are not left out. What became of each is its outcome; kCold where rows of
// it are to be read first.
HILLINFER_API int32_t hillinfer_attend_rows(const StepRows* asked, const PoolTable* pool) {
    return guarded([&] {
        for_each_row(*asked, [&](StepRow& own) { attend_row(own, *pool, *asked); });
    });
}

// Stores a token's row of every sequence whose group it does not fill; `overflows` gets how many
// finite numbers of each became the largest that fit. All of them have room: none is left out.
HILLINFER_API void hillinfer_store_rows(const StepRows* asked, const Shape* shape,
                                        const RowStates* keys, const RowStates* values,
                                        int64_t* overflows) {
    for (int64_t number = 0; number < asked->count; ++number) {
        StepRow& own = asked->rows[number];
        overflows[number] = store_token(own.tables[asked->layer], *shape,
                                        int32_t(keys->number_type), row_of(*keys, own.row),
                                        keys->head_stride, row_of(*values, own.row),
                                        values->head_stride);
    }
}
