// SPDX-License-Identifier: Apache-2.0
#include "prompt_attention.h"

#include <cstdlib>
#include <memory>
#include <new>

#include "api.h"
#include "attention.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

struct Freed {
    void operator()(float* memory) const { std::free(memory); }
};

// Whole cache lines.
std::unique_ptr<float, Freed> aligned_floats(int64_t count) {
    constexpr size_t kLine = 64;
    const size_t bytes = (size_t(count) * sizeof(float) + kLine - 1) / kLine * kLine;
    std::unique_ptr<float, Freed> memory(static_cast<float*>(std::aligned_alloc(kLine, bytes)));
    if (!memory) {
        throw std::bad_alloc();
    }
    return memory;
}

}  // namespace

void attend_block(const AttentionKernels& kernels, const PromptBlock& block) {
    if (!block.queries || !block.tokens) {
        return;
    }
    const PromptKernels& own = kernels.prompts;
    const int64_t parts = (block.tokens + kPromptKeys - 1) / kPromptKeys;
    const int64_t part_floats = own.packed_floats(block.head_dim);
    const auto packed = aligned_floats(part_floats * parts * block.kv_heads);
    run_parallel(block.threads, parts * block.kv_heads, [&](int64_t item, int) {
        own.pack(block, int(item / parts), item % parts * kPromptKeys,
                 packed.get() + item * part_floats);
    });
    const int64_t tiles = (block.queries + kPromptQueries - 1) / kPromptQueries;
    const int heads = block.kv_heads * block.group_size;
    run_parallel(block.threads, tiles * heads, [&](int64_t item, int) {
        // Tiles that see most come first, so that threads end at about the same time.
        const int64_t tile = tiles - 1 - item / heads;
        const int head = int(item % heads);
        own.attend(block, head, tile * kPromptQueries,
                   packed.get() + head / block.group_size * parts * part_floats);
    });
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_attend_block(int32_t variant,
                                             const hillinfer::PromptBlock* block) {
    const auto* kernels = hillinfer::attention_kernels(variant);
    if (!kernels) {
        return hillinfer::kNoSuchVariant;
    }
    return hillinfer::guarded([&] { hillinfer::attend_block(*kernels, *block); });
}
