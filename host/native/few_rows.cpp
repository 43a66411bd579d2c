// SPDX-License-Identifier: Apache-2.0
// Threads share the outputs of a linear layer; each reads its weights once for all rows.
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

void few_rows(FewRowsKernel kernel, const FewRows& given) {
    const int64_t output_bytes = std::max<int64_t>(1, given.inputs * int64_t(sizeof(float)));
    const int64_t own = std::max<int64_t>(1, kItemBytes / output_bytes / kItemOutputs) * kItemOutputs;
    const int threads = worthwhile_threads(given.threads, given.outputs * output_bytes);
    run_parallel(threads, (given.outputs + own - 1) / own, [&](int64_t item, int) {
        kernel(given, item * own, std::min(given.outputs, (item + 1) * own));
    });
}

}  // namespace
}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_few_rows(int32_t variant, const hillinfer::FewRows* given) {
    if (!hillinfer_has_variant(variant)) {
        return hillinfer::kNoSuchVariant;
    }
    return hillinfer::guarded([&] { hillinfer::few_rows(hillinfer::kernel_of(variant), *given); });
}
