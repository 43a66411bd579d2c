// SPDX-License-Identifier: Apache-2.0
// Working memory of calls over a sequence's groups: query codes of its segments, and threads' buffers.
//
// Everything has internal linkage: each file compiles its own copy.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

// Groups that a thread takes at once: few enough that all threads end at about the same time.
constexpr int64_t kGroupsAtOnce = 16;

inline int64_t groups_at_once(int64_t groups, int threads) {
    return std::clamp<int64_t>(groups / (8 * std::max(threads, 1)), 1, kGroupsAtOnce);
}

inline int64_t groups_of(int64_t tokens) { return (tokens + kGroupTokens - 1) / kGroupTokens; }

template <class T>
class Aligned {
public:
    explicit Aligned(size_t count)
        : memory_(new uint8_t[count * sizeof(T) + 64]),
          values_(reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + 63) / 64 *
                                       64)) {}
    T* get() const { return values_; }

private:
    std::unique_ptr<uint8_t[]> memory_;
    T* values_;
};

// Query codes of all segments, and as the kernels read them.
class Queries {
public:
    Queries(const Kernels& kernels, const Shape& shape, int64_t segments)
        : kernels_(kernels),
          shape_(shape),
          arranged_bytes_((kernels.arranged_bytes(shape) + 63) / 64 * 64),
          numbers_(size_t(segments) * shape.rows() * 3),
          arranged_(size_t(segments) * arranged_bytes_) {}

    // `room` holds rows * padded_dim codes on their way.
    void code(const float* scaled, const Segment& segment, int64_t number, int8_t* room) {
        QueryCodes out = codes_of(number);
        out.codes = room;
        kernels_.code_query(shape_, scaled, segment, out);
        kernels_.arrange(shape_, out.codes, arranged_of(number));
    }

    QueryCodes codes_of(int64_t number) {
        int32_t* own = numbers_.get() + size_t(number) * shape_.rows() * 3;
        return {nullptr, own, own + shape_.rows(), own + 2 * shape_.rows()};
    }

    int8_t* arranged_of(int64_t number) { return arranged_.get() + size_t(number) * arranged_bytes_; }

private:
    const Kernels& kernels_;
    const Shape& shape_;
    size_t arranged_bytes_;
    Aligned<int32_t> numbers_;
    Aligned<int8_t> arranged_;
};

// What one thread works in, allocated before any thread starts: none may fail.
struct Scratch {
    explicit Scratch(const Shape& shape)
        : codes(size_t(shape.rows()) * shape.padded_dim),
          products(size_t(shape.rows()) * kGroupTokens),
          row_words(size_t(shape.rows()) * kRowWords),
          log_weights(size_t(shape.rows()) * kGroupTokens),
          probes(shape.group_bytes()) {}

    Aligned<int8_t> codes;
    Aligned<int32_t> products;
    Aligned<int32_t> row_words;
    Aligned<int32_t> log_weights;
    Aligned<uint8_t> probes;
};

inline std::vector<Scratch> scratches(const Shape& shape, int threads) {
    std::vector<Scratch> made;
    for (int i = 0; i < std::clamp(threads, 1, kMostThreads); ++i) {
        made.emplace_back(shape);
    }
    return made;
}

}  // namespace
}  // namespace hillinfer
