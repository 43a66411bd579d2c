// SPDX-License-Identifier: Apache-2.0
// Threads share the outputs of linear layers; each reads its weights once for all rows.
#include "few_rows.h"

#include <algorithm>

#include "api.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

// Of the weights that a thread takes at once, so that more rows than fit into registers find them
// near; a multiple of all numbers of outputs that are worked on together.
constexpr int64_t kItemBytes = 64 << 10;
constexpr int64_t kItemOutputs = 12;

FewRowsKernel kernel_of(int32_t variant) {
    switch (variant) {
#if defined(__x86_64__)
        case kAvx2Variant:
            return few_rows_avx2;
        case kAvx512Variant:
            return few_rows_avx512;
#endif
        default:
            return few_rows_portable;
    }
}

// Of an output's weights.
int64_t output_bytes(const FewRows& layer) {
    const size_t bytes = layer.number_type == kBfloat16Numbers ? sizeof(uint16_t) : sizeof(float);
    return std::max<int64_t>(1, layer.inputs * int64_t(bytes));
}

// Outputs of an item.
int64_t item_outputs(const FewRows& layer) {
    return std::max<int64_t>(1, kItemBytes / output_bytes(layer) / kItemOutputs) * kItemOutputs;
}

int64_t items_of(const FewRows& layer) {
    const int64_t own = item_outputs(layer);
    return (layer.outputs + own - 1) / own;
}

// All layers at once: threads that share one layer wait for each other at its end.
void few_rows(FewRowsKernel kernel, const FewRows* layers, int64_t count) {
    int64_t items = 0, bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        items += items_of(layers[i]);
        bytes += layers[i].outputs * output_bytes(layers[i]);
    }
    run_parallel(worthwhile_threads(layers->threads, bytes), items, [=](int64_t item, int) {
        const FewRows* layer = layers;
        for (int64_t before; item >= (before = items_of(*layer)); item -= before) {
            ++layer;
        }
        const int64_t own = item_outputs(*layer);
        kernel(*layer, item * own, std::min(layer->outputs, (item + 1) * own));
    });
}

}  // namespace
}  // namespace hillinfer

// Of one layer or more; their threads are those of the first one.
HILLINFER_API int32_t hillinfer_few_rows(int32_t variant, const hillinfer::FewRows* layers,
                                         int64_t count) {
    if (!hillinfer_has_variant(variant)) {
        return hillinfer::kNoSuchVariant;
    }
    return hillinfer::guarded(
        [&] { hillinfer::few_rows(hillinfer::kernel_of(variant), layers, count); });
}
