// SPDX-License-Identifier: Apache-2.0
// The C interface. Nothing here keeps memory of a caller; a call returns when its threads are done.
#include <algorithm>
#include <atomic>
#include <vector>

#include "api.h"
#include "choice.h"
#include "kernels.h"
#include "launch_thread.h"
#include "selection.h"
#include "sequence.h"
#include "thread_pool.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

using namespace hillinfer;

namespace {

#if defined(__x86_64__)
// Every processor with AVX2 but a few has these two, which attention uses.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
#endif

}  // namespace

namespace hillinfer {

const Kernels* scoring_kernels(int32_t variant) {
    switch (variant) {
        case kPortableVariant:
            return &kPortable;
#if defined(__x86_64__)
        case kAvx2Variant:
            return has_avx2() ? &kAvx2 : nullptr;
        case kAvx512Variant:
            return has_avx2() && __builtin_cpu_supports("avx512f") &&
                           __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512vnni")
                       ? &kAvx512Vnni
                       : nullptr;
#elif defined(__aarch64__)
        case kNeonVariant: {
            constexpr unsigned long kDotProduct = 1UL << 20;  // HWCAP_ASIMDDP
            return getauxval(AT_HWCAP) & kDotProduct ? &kNeonDot : nullptr;
        }
#endif
        default:
            return nullptr;
    }
}

}  // namespace hillinfer

namespace {

template <class Call>
int32_t guarded(int32_t variant, Call call) {
    const Kernels* kernels = scoring_kernels(variant);
    return kernels ? hillinfer::guarded([&] { call(*kernels); }) : kNoSuchVariant;
}

}  // namespace

// Changes with the interface or with the contract: 100 * contract version + interface version.
HILLINFER_API int32_t hillinfer_version() { return 134; }

HILLINFER_API int32_t hillinfer_has_variant(int32_t variant) { return scoring_kernels(variant) != nullptr; }

HILLINFER_API int32_t hillinfer_score(int32_t variant, const Sequence* sequence, uint32_t* tuples) {
    return guarded(variant, [&](const Kernels& kernels) {
        score_sequence(kernels, *sequence, tuples);
    });
}

// Query codes and offsets of a sequence; see sequence.h.
HILLINFER_API int32_t hillinfer_start(int32_t variant, const Sequence* sequence, int8_t* codes,
                                      int32_t* exponents, int32_t* corrections,
                                      int32_t* offsets) {
    return guarded(variant, [&](const Kernels& kernels) {
        sequence_start(kernels, *sequence, {codes, exponents, corrections}, offsets);
    });
}

// A launch of `score_tokens`, or the host's part beside one.
HILLINFER_API int32_t hillinfer_score_pieces(int32_t variant, const Sequence* sequence,
                                             const Piece* pieces, int64_t count) {
    return guarded(variant, [&](const Kernels& kernels) {
        score_pieces(kernels, *sequence, pieces, count);
    });
}

HILLINFER_API int32_t hillinfer_log_weights(int32_t variant, const Sequence* sequence,
                                            const Segment* segment, int32_t* log_weights,
                                            uint8_t* exponents) {
    return guarded(variant, [&](const Kernels& kernels) {
        segment_log_weights(kernels, *sequence, *segment, log_weights, exponents);
    });
}

// L' of some tokens; see sequence.h.
HILLINFER_API int32_t hillinfer_aligned_tokens(int32_t variant, const Sequence* sequence,
                                               const int64_t* positions, int64_t count,
                                               int32_t* aligned, uint8_t* invalid) {
    return guarded(variant, [&](const Kernels& kernels) {
        aligned_tokens(kernels, *sequence, positions, count, aligned, invalid);
    });
}

HILLINFER_API int32_t hillinfer_finish(int32_t variant, const Sequence* sequence, int64_t tokens,
                                       const int32_t* log_weights, const uint8_t* exponents,
                                       uint32_t* tuples) {
    return guarded(variant, [&](const Kernels& kernels) {
        finish_sequence(kernels, *sequence, tokens, log_weights, exponents, tuples);
    });
}

// Of some groups, with the offsets that `hillinfer_start` gave; see sequence.h.
HILLINFER_API int32_t hillinfer_finish_groups(int32_t variant, const Sequence* sequence,
                                              const int32_t* offsets, int64_t position,
                                              int64_t tokens, const int32_t* log_weights,
                                              const uint8_t* exponents, uint32_t* tuples,
                                              int64_t stride) {
    return guarded(variant, [&](const Kernels& kernels) {
        finish_groups(kernels, *sequence, offsets, position, tokens, log_weights, exponents, tuples,
                      stride);
    });
}

// c and M of a segment from its tokens, at least one, `kStatisticsChannels` channels of a KV head at
// a time on each thread.
HILLINFER_API int32_t hillinfer_statistics(int32_t variant, const Sequence* sequence,
                                           const uint16_t* keys, int64_t token_stride,
                                           int64_t head_stride, int64_t channel_stride,
                                           int64_t tokens, int8_t* exponents, int32_t* means) {
    return guarded(variant, [&](const Kernels& kernels) {
        const int head_dim = sequence->shape.head_dim;
        const int pieces = (head_dim + kStatisticsChannels - 1) / kStatisticsChannels;
        run_parallel(sequence->threads, int64_t(sequence->shape.kv_heads) * pieces,
                     [&](int64_t item, int) {
                         const int64_t head = item / pieces;
                         const int first = int(item % pieces) * kStatisticsChannels;
                         const int64_t own = head * head_dim + first;
                         kernels.statistics(keys + head * head_stride + first * channel_stride,
                                            token_stride, channel_stride, tokens,
                                            std::min(kStatisticsChannels, head_dim - first),
                                            exponents + own, means + own);
                     });
    });
}

// Codes keys into a shadow, 64 tokens at a time on each thread.
HILLINFER_API int32_t hillinfer_encode(int32_t variant, const Sequence* sequence,
                                       const Segment* segment, const uint16_t* keys,
                                       int64_t token_stride, int64_t head_stride,
                                       int64_t channel_stride, uint8_t* shadow,
                                       int64_t first_token, int64_t tokens) {
    return guarded(variant, [&](const Kernels& kernels) {
        const int64_t first_group = first_token / kGroupTokens;
        const int64_t groups = (first_token + tokens + kGroupTokens - 1) / kGroupTokens - first_group;
        run_parallel(sequence->threads, groups, [&](int64_t item, int) {
            const int64_t group = (first_group + item) * kGroupTokens;
            const int64_t start = std::max(group, first_token);
            const int64_t stop = std::min(group + kGroupTokens, first_token + tokens);
            kernels.encode(sequence->shape, keys + (start - first_token) * token_stride,
                           token_stride, head_stride, channel_stride, *segment, shadow, start,
                           stop - start);
        });
    });
}

// Codes values into a segment's value shadow, 64 tokens at a time on each thread.
HILLINFER_API int32_t hillinfer_encode_values(int32_t variant, const Sequence* sequence,
                                              const Segment* segment, const uint16_t* values,
                                              int64_t token_stride, int64_t head_stride,
                                              int64_t channel_stride, uint8_t* shadow,
                                              int64_t first_token, int64_t tokens) {
    return guarded(variant, [&](const Kernels& kernels) {
        const Shape& shape = sequence->shape;
        const int64_t first_group = first_token / kGroupTokens;
        const int64_t groups = (first_token + tokens + kGroupTokens - 1) / kGroupTokens - first_group;
        run_parallel(sequence->threads, groups, [&](int64_t item, int) {
            const int64_t start = std::max((first_group + item) * kGroupTokens, first_token);
            const int64_t stop =
                std::min((first_group + item + 1) * kGroupTokens, first_token + tokens);
            uint8_t* const group = shadow + size_t(first_group + item) * shape.value_group_bytes();
            const int64_t in_group = start % kGroupTokens;
            const int64_t row_bytes = int64_t(shape.code_row_bytes());
            const ValuePlaces to{group + shape.kv_heads * kBeatBytes + in_group * row_bytes,
                                 row_bytes, group + in_group, 1, kBeatBytes};
            kernels.encode_values(shape, values + (start - first_token) * token_stride,
                                  token_stride, head_stride, channel_stride, *segment, to,
                                  stop - start);
        });
    });
}

// Codes values into memory that holds single tokens: each a code row and its exponents.
HILLINFER_API int32_t hillinfer_encode_value_rows(int32_t variant, const Sequence* sequence,
                                                  const Segment* segment, const uint16_t* values,
                                                  int64_t token_stride, int64_t head_stride,
                                                  int64_t channel_stride, uint8_t* rows,
                                                  int64_t row_stride, int64_t tokens) {
    return guarded(variant, [&](const Kernels& kernels) {
        const Shape& shape = sequence->shape;
        const ValuePlaces to{rows, row_stride, rows + shape.code_row_bytes(), row_stride, 1};
        kernels.encode_values(shape, values, token_stride, head_stride, channel_stride, *segment, to,
                              tokens);
    });
}

// Scales a query as `hillinfer_choose` does; of the sequence only the shape is looked at.
HILLINFER_API int32_t hillinfer_scale(const Sequence* sequence, const Choice* choice, float* out) {
    const ExactFloats exact;
    return scale_query(sequence->shape, *choice, out) ? kDone : kNotFinite;
}

// Selects from `sets` times `tokens` tuples; see choice.h.
HILLINFER_API int32_t hillinfer_select(const uint32_t* tuples, int64_t sets, int64_t tokens,
                                       const Quota* quota, int32_t threads, int64_t* out) {
    return guarded(kPortableVariant, [&](const Kernels&) {
        select_sets(tuples, sets, tokens, *quota, threads, out);
    });
}

// A thread for launches; see launch_thread.h.
HILLINFER_API int32_t hillinfer_launches_open(void** out) {
    return guarded(kPortableVariant, [&](const Kernels&) { *out = new LaunchThread; });
}

// `hillinfer_score_pieces` on such a thread. The sequence and the list of pieces may go at once; what
// pieces point to must stay until `hillinfer_launches_wait` has returned.
HILLINFER_API int32_t hillinfer_launches_begin(void* thread, int32_t variant,
                                               const Sequence* sequence, const Piece* pieces,
                                               int64_t count) {
    if (static_cast<LaunchThread*>(thread)->is_elsewhere()) {
        return kFailed;
    }
    return guarded(variant, [&](const Kernels&) {
        const Sequence own = *sequence;
        const std::vector<Piece> listed(pieces, pieces + count);
        static_cast<LaunchThread*>(thread)->begin([variant, own, listed] {
            return hillinfer_score_pieces(variant, &own, listed.data(), int64_t(listed.size()));
        });
    });
}

// Returns, once nothing is under way, what came of the last launch.
HILLINFER_API int32_t hillinfer_launches_wait(void* thread) {
    LaunchThread* const own = static_cast<LaunchThread*>(thread);
    return own->is_elsewhere() ? kFailed : own->wait();
}

HILLINFER_API void hillinfer_launches_close(void* thread) {
    LaunchThread* const own = static_cast<LaunchThread*>(thread);
    if (!own->is_elsewhere()) {
        delete own;
    }
}

// Reads memory as fast as the machine can and returns a sum of it, so that nobody leaves it out; 0
// where it cannot.
HILLINFER_API uint64_t hillinfer_read_sum(int32_t variant, const uint8_t* bytes, int64_t count,
                                          int32_t threads) {
    constexpr int64_t kPiece = 1 << 20;
    std::atomic<uint64_t> total{0};
    guarded(variant, [&](const Kernels& kernels) {
        run_parallel(threads, (count + kPiece - 1) / kPiece, [&](int64_t item, int) {
            total += kernels.read_sum(bytes + item * kPiece,
                                      size_t(std::min(kPiece, count - item * kPiece)));
        });
    });
    return total;
}

// Scales a query, scores a sequence with it and selects; see choice.h.
HILLINFER_API int32_t hillinfer_choose(int32_t variant, const Sequence* sequence,
                                       const Choice* choice, int64_t* out) {
    bool finite = true;
    const int32_t outcome = guarded(variant, [&](const Kernels& kernels) {
        finite = choose(kernels, *sequence, *choice, out);
    });
    return finite ? outcome : kNotFinite;
}
