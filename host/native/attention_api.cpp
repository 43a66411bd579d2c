// SPDX-License-Identifier: Apache-2.0
// The C interface to attention. Every call returns an Outcome unless its name says what.
#include <atomic>

#include "api.h"
#include "attention.h"
#include "thread_pool.h"

using namespace hillinfer;

namespace hillinfer {

const AttentionKernels* attention_kernels(int32_t variant) {
    if (!hillinfer_has_variant(variant)) {
        return nullptr;
    }
    switch (variant) {
#if defined(__x86_64__)
        case kAvx2Variant:
            return &kAvx2Attention;
        case kAvx512Variant:
            return &kAvx512Attention;
#elif defined(__aarch64__)
        case kNeonVariant:
            return &kNeonAttention;
#endif
        default:
            return &kPortableAttention;
    }
}

}  // namespace hillinfer

namespace {

template <class Call>
int32_t guarded(int32_t variant, Call call) {
    const AttentionKernels* kernels = attention_kernels(variant);
    return kernels ? hillinfer::guarded([&] { call(*kernels); }) : kNoSuchVariant;
}

}  // namespace

HILLINFER_API int32_t hillinfer_tile_rows() { return kTileRows; }

HILLINFER_API int64_t hillinfer_attention_bytes(const Attention* attention) {
    return int64_t(attention_state_bytes(*attention));
}

HILLINFER_API int32_t hillinfer_attention_begin(int32_t variant, const Attention* attention,
                                                void* state) {
    return guarded(variant, [&](const AttentionKernels& kernels) {
        begin_attention(kernels, *attention, state);
    });
}

HILLINFER_API int32_t hillinfer_attention_add(int32_t variant, const Attention* attention,
                                              const RowSet* sets, int64_t set_count, void* state) {
    return guarded(variant, [&](const AttentionKernels& kernels) {
        add_rows(kernels, *attention, sets, set_count, state);
    });
}

HILLINFER_API int32_t hillinfer_attention_result(int32_t variant, const Attention* attention,
                                                 const void* state, float* out) {
    return guarded(variant, [&](const AttentionKernels& kernels) {
        attention_result(kernels, *attention, state, out);
    });
}

HILLINFER_API int32_t hillinfer_inner_products(int32_t variant, const Attention* attention,
                                               const uint64_t* rows, int64_t count, float* out,
                                               int64_t stride) {
    return guarded(variant, [&](const AttentionKernels& kernels) {
        inner_products(kernels, *attention, rows, count, out, stride);
    });
}

HILLINFER_API int32_t hillinfer_weighted_sum(int32_t variant, const Attention* attention,
                                             const uint64_t* rows, int64_t count,
                                             const float* weights, int64_t stride, float* out) {
    return guarded(variant, [&](const AttentionKernels& kernels) {
        weighted_sum(kernels, *attention, rows, count, weights, stride, out);
    });
}

// Reads rows where they lie as fast as the machine can and returns a sum of them; 0 where it cannot.
HILLINFER_API uint64_t hillinfer_read_rows(int32_t variant, const uint64_t* rows, int64_t count,
                                           int64_t row_bytes, int32_t threads) {
    std::atomic<uint64_t> total{0};
    guarded(variant, [&](const AttentionKernels& kernels) {
        run_parallel(threads, (count + kChunkRows - 1) / kChunkRows, [&](int64_t item, int) {
            const int64_t first = item * kChunkRows;
            const int64_t left = count - first;
            total += kernels.read_rows(rows + first, left < kChunkRows ? left : kChunkRows,
                                       row_bytes);
        });
    });
    return total;
}
