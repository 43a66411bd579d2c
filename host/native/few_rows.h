// SPDX-License-Identifier: Apache-2.0
// A linear layer for few rows, such as sequences that step together bring it.
#pragma once
#include <cstdint>

#include "halves.h"

namespace hillinfer {

// `out` (row_count, outputs) gets each row times `weights` (outputs, inputs), and `bias` (outputs)
// where there is one. Rows lie `row_stride` numbers apart; all else is without gaps. All are numbers of
// one `NumberType`, float32 or bfloat16; sums are made in float32, and rounded once at their end.
struct FewRows {
    const void* rows;
    int64_t row_count;
    int64_t row_stride;
    int64_t inputs;
    const void* weights;
    const void* bias;
    int64_t outputs;
    void* out;
    int32_t threads;
    int32_t number_type;
};

// Computes the outputs from `first` to before `stop`, of all rows.
using FewRowsKernel = void (*)(const FewRows& given, int64_t first, int64_t stop);

// Of an instruction set.
void few_rows_portable(const FewRows& given, int64_t first, int64_t stop);
void few_rows_avx2(const FewRows& given, int64_t first, int64_t stop);
void few_rows_avx512(const FewRows& given, int64_t first, int64_t stop);

}  // namespace hillinfer
