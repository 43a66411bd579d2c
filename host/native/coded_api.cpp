// SPDX-License-Identifier: Apache-2.0
// The C interface of attention over rows and coded tokens; see coded.h.
#include <algorithm>
#include <memory>

#include "api.h"
#include "coded.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

const CodedKernels* coded_kernels(int32_t variant) {
    if (!attention_kernels(variant)) {
        return nullptr;
    }
    switch (variant) {
#if defined(__x86_64__)
        case kAvx2Variant:
            return &kAvx2Coded;
        case kAvx512Variant:
            return &kAvx512Coded;
#elif defined(__aarch64__)
        case kNeonVariant:
            return &kNeonCoded;
#endif
        default:
            return &kPortableCoded;
    }
}

// Memory of one call.
class OwnWork {
public:
    OwnWork(const CodedAttention& call, int64_t exact_tokens)
        : heads_(size_t(call.query_heads())),
          numbers_(new int32_t[heads_ * size_t(exact_tokens + 1)]),
          totals_(new int64_t[heads_]),
          broken_(new uint8_t[heads_]()),
          floats_(new float[(heads_ + 2 * size_t(call.kv_heads)) * kMostCodedChannels]) {
        float* const means = floats_.get() + heads_ * kMostCodedChannels;
        work_ = {numbers_.get() + heads_,
                 {numbers_.get(), totals_.get(), floats_.get(), broken_.get()},
                 means,
                 means + size_t(call.kv_heads) * kMostCodedChannels};
    }

    const CodedWork& work() const { return work_; }

private:
    size_t heads_;
    std::unique_ptr<int32_t[]> numbers_;
    std::unique_ptr<int64_t[]> totals_;
    std::unique_ptr<uint8_t[]> broken_;
    std::unique_ptr<float[]> floats_;
    CodedWork work_;
};

template <class Call>
int32_t with_kernels(int32_t variant, Call call) {
    const CodedKernels* kernels = coded_kernels(variant);
    return kernels ? guarded([&] { call(*kernels); }) : kNoSuchVariant;
}

}  // namespace

void attend_coded(int32_t variant, const CodedAttention& call, const uint64_t* rows, int64_t count,
                  const CodedTokens* segments, int64_t segment_count, float* out) {
    const CodedKernels& kernels = *coded_kernels(variant);
    const OwnWork own(call, count);
    const int least = (call.head_count + kMostBlockHeads - 1) / kMostBlockHeads;
    const int parts = std::max(least, std::max(1, std::min(call.threads, call.head_count)));
    run_parallel(std::max(call.threads, 1), parts, [&](int64_t part, int) {
        const int first = int(call.head_count * part / parts);
        const int stop = int(call.head_count * (part + 1) / parts);
        kernels.attend(call, {call.first_head + first, stop - first}, rows, count, segments,
                       segment_count, own.work(), out);
    });
}

}  // namespace hillinfer

using namespace hillinfer;

HILLINFER_API int32_t hillinfer_coded_attend(int32_t variant, const CodedAttention* call,
                                             const uint64_t* rows, int64_t count,
                                             const CodedTokens* segments, int64_t segment_count,
                                             float* out) {
    return with_kernels(variant, [&](const CodedKernels&) {
        attend_coded(variant, *call, rows, count, segments, segment_count, out);
    });
}

// Softmax over each block of 64 rows.
HILLINFER_API int32_t hillinfer_exact_blocks(int32_t variant, const CodedAttention* call,
                                             const uint64_t* rows, int64_t count,
                                             const BlockPartials* out) {
    return with_kernels(variant, [&](const CodedKernels& kernels) {
        const OwnWork own(*call, kBlockTokens);
        kernels.exact_blocks(*call, rows, count, own.work(), *out);
    });
}

// Softmax over each block of 64 of a segment's coded tokens.
HILLINFER_API int32_t hillinfer_coded_blocks(int32_t variant, const CodedAttention* call,
                                             const CodedTokens* segment, const BlockPartials* out) {
    return with_kernels(variant, [&](const CodedKernels& kernels) {
        const OwnWork own(*call, 0);
        kernels.coded_blocks(*call, *segment, own.work(), *out);
    });
}

// Output of blocks, exact ones first, each kind in ascending positions.
HILLINFER_API int32_t hillinfer_merge_blocks(int32_t variant, const CodedAttention* call,
                                             const BlockPartials* blocks, int64_t count, float* out) {
    return with_kernels(variant, [&](const CodedKernels& kernels) {
        kernels.merge(*call, *blocks, count, out);
    });
}
