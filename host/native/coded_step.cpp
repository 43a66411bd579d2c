// SPDX-License-Identifier: Apache-2.0
#include "coded_step.h"

#include <memory>
#include <vector>

#include "api.h"
#include "choice.h"
#include "coded.h"
#include "halves.h"
#include "kernels.h"
#include "sequence.h"

namespace hillinfer {

bool find_codes(const LayerTable& table, const CodeSlots& slots, int32_t segment_tokens, int64_t held,
                CodedSelection& selection) {
    constexpr int64_t kChunkSlots = 64;
    int64_t next = 0, count = 0, settled = 0, missing = 0;
    for (int64_t i = 0; i < selection.selected_count; ++i) {
        const int64_t position = selection.selected[i];
        if (next < selection.exact_count && selection.exact[next] == position) {
            ++next;
            continue;
        }
        const int64_t segment = position / segment_tokens;
        if (position < 0 || segment >= selection.segment_count) {
            return false;
        }
        selection.coded[count] = position;
        selection.codes[count] = 0;
        if (position < held) {
            const int64_t group = position / kGroupTokens;
            if (group >= table.group_count) {
                return false;
            }
            const int64_t row = table.groups[group] * kGroupTokens + position % kGroupTokens;
            selection.rows[count] = row;
            const int32_t slot = row < slots.row_count ? slots.slot_of_row[row] : -1;
            if (slot >= 0 && slots.numbers[slot] == selection.segments[segment].number) {
                selection.codes[count] =
                    slots.chunks[slot / kChunkSlots] +
                    uint64_t(slot % kChunkSlots) * uint64_t(slots.row_bytes);
            } else {
                selection.missing[missing++] = count;
            }
            ++settled;
        }
        ++count;
    }
    selection.coded_count = count;
    selection.settled_count = settled;
    selection.missing_count = missing;
    return next == selection.exact_count;
}

namespace {

// Codes the values of a row.
void code_row(const Kernels& kernels, const Shape& shape, int32_t stored_type, const uint8_t* row,
              const SegmentValues& own, int64_t row_bytes, uint8_t* out,
              std::vector<uint16_t>& halves) {
    const size_t numbers = size_t(shape.kv_heads) * shape.head_dim;
    const uint16_t* values = reinterpret_cast<const uint16_t*>(row) + numbers;
    if (stored_type == kBfloat16) {
        halves.resize(numbers);
        for (size_t i = 0; i < numbers; ++i) {
            halves[i] = half_of(uint32_t(values[i]) << 16);
        }
        values = halves.data();
    }
    const Segment segment{nullptr, own.exponents, own.means, nullptr, 1};
    const ValuePlaces to{out, row_bytes, out + shape.code_row_bytes(), row_bytes, 1};
    kernels.encode_values(shape, values, int64_t(numbers), shape.head_dim, 1, segment, to, 1);
}

// Codes of tokens in the tail, which come behind the missing ones, and where all of these lie.
void take_arrived(const Kernels& kernels, const LayerTable& table, const DecodeStep& step,
                  const CodedSelection& selection, int64_t row_bytes) {
    const Shape& shape = step.shape;
    uint8_t* out = selection.arrived;
    for (int64_t i = 0; i < selection.missing_count; ++i, out += row_bytes) {
        selection.codes[selection.missing[i]] = uint64_t(reinterpret_cast<uintptr_t>(out));
    }
    std::vector<uint16_t> halves;
    for (int64_t i = selection.settled_count; i < selection.coded_count; ++i, out += row_bytes) {
        const int64_t position = selection.coded[i];
        code_row(kernels, shape, step.stored_type,
                 table.tail + (position - table.held) * table.row_bytes,
                 selection.segments[position / shape.segment_tokens], row_bytes, out, halves);
        selection.codes[i] = uint64_t(reinterpret_cast<uintptr_t>(out));
    }
}

bool attend_found(const Kernels& kernels, int32_t variant, const LayerTable& table,
                  const DecodeStep& step, const CodedSelection& selection, const uint64_t* rows,
                  float* out) {
    const Shape& shape = step.shape;
    const int64_t count = selection.coded_count;
    const size_t heads = size_t(shape.rows());
    std::vector<float> memory;
    const Attention query = attention_of(step, memory);
    std::vector<float> scaled(heads * size_t(shape.head_dim));
    const Choice choice{query.query, shape.head_dim, step.group_size, step.factor, 0, 0, 0};
    if (!scale_query(shape, choice, scaled.data())) {
        return false;
    }
    const std::unique_ptr<int32_t[]> aligned(new int32_t[heads * size_t(count) + 1]);
    const std::unique_ptr<uint8_t[]> invalid(new uint8_t[size_t(shape.kv_heads) * count + 1]);
    const Sequence sequence{shape, scaled.data(), table.segments, table.segment_count, step.threads,
                            0};
    aligned_tokens(kernels, sequence, selection.coded, count, aligned.get(), invalid.get());
    const std::unique_ptr<uint64_t[]> exponents(new uint64_t[size_t(count) + 1]);
    for (int64_t i = 0; i < count; ++i) {
        exponents[i] = selection.codes[i] + shape.code_row_bytes();
    }
    std::vector<CodedTokens> described;
    for (int64_t first = 0; first < count;) {
        const int64_t number = selection.coded[first] / shape.segment_tokens;
        int64_t stop = first + 1;
        while (stop < count && selection.coded[stop] / shape.segment_tokens == number) {
            ++stop;
        }
        const SegmentValues& own = selection.segments[number];
        described.push_back({aligned.get() + first, invalid.get() + first, selection.codes + first,
                             exponents.get() + first, 1, own.exponents, own.means, count,
                             stop - first});
        first = stop;
    }
    const CodedAttention call{scaled.data(),    shape.kv_heads, step.group_size,
                              shape.head_dim,   step.stored_type, 0,
                              shape.kv_heads,   step.threads};
    attend_coded(variant, call, rows, selection.exact_count, described.data(),
                 int64_t(described.size()), out);
    return true;
}

}  // namespace
}  // namespace hillinfer

using namespace hillinfer;

// See coded_step.h; kMisplaced where a position is nowhere.
HILLINFER_API int32_t hillinfer_find_codes(const LayerTable* table, const CodeSlots* slots,
                                           int32_t segment_tokens, int64_t held,
                                           CodedSelection* selection) {
    return find_codes(*table, *slots, segment_tokens, held, *selection) ? kDone : kMisplaced;
}

// Codes the values of missing tokens, whose rows lie at some addresses, from the first one on.
HILLINFER_API int32_t hillinfer_code_missing(int32_t variant, const DecodeStep* step,
                                             const CodedSelection* selection, int64_t row_bytes,
                                             const uint64_t* rows, int64_t first, int64_t count) {
    return guarded([&] {
        const Kernels& kernels = *scoring_kernels(variant);
        std::vector<uint16_t> halves;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = selection->coded[selection->missing[first + i]];
            code_row(kernels, step->shape, step->stored_type,
                     reinterpret_cast<const uint8_t*>(uintptr_t(rows[i])),
                     selection->segments[position / step->shape.segment_tokens], row_bytes,
                     selection->arrived + (first + i) * row_bytes, halves);
        }
    });
}

// Attends to exact rows, all here, and to coded tokens, whose codes are here, or arrived, or whose rows
// are in the tail. kNotFinite for a query that is not, kMisplaced for a coded token without a key code.
HILLINFER_API int32_t hillinfer_attend_codes(int32_t variant, const LayerTable* table,
                                             const DecodeStep* step,
                                             const CodedSelection* selection, int64_t row_bytes,
                                             const uint64_t* rows, float* out) {
    const int64_t count = selection->coded_count;
    const int64_t base = (table->segment_count - 1) * step->shape.segment_tokens;
    if (count && (selection->coded[count - 1] >= base + table->coded ||
                  selection->coded[count - 1] >= table->held + kGroupTokens)) {
        return kMisplaced;
    }
    bool finite = true;
    const int32_t outcome = guarded([&] {
        const Kernels& kernels = *scoring_kernels(variant);
        take_arrived(kernels, *table, *step, *selection, row_bytes);
        finite = attend_found(kernels, variant, *table, *step, *selection, rows, out);
    });
    return finite ? outcome : kNotFinite;
}
