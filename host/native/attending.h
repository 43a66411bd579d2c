// SPDX-License-Identifier: Apache-2.0
// Attention to a run of rows some of which are still on their way from the drive.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "decode_step.h"
#include "selected_sets.h"

namespace hillinfer {

// Consecutive rows of selected sets, as the caller asks for them. Shared with Python: the order and
// types of these fields are part of the C interface.
struct Attending {
    const DecodeStep* step;
    const SelectedSets* selected;  // A row without an address is on its way.
    void* state;    // `attention_state_bytes`, aligned to 64: rows of the runs before.
    uint8_t* kept;  // What sets keep from run to run, as `ComingRows` has it.
    int64_t start;  // The run's first row,
    int64_t count;  // and how many it has.
    float* out;  // Gets the output once the rows are all here; null where another run follows.
    int32_t variant;
    int32_t is_begun;  // Whether the state has rows.
    int32_t is_done;   // Whether it has those of this run.
    int64_t nanoseconds;  // That were spent on attention so far.
};

// Attends to rows that are here while others come. Until `end` the state stays as it was.
class AttendingRun {
public:
    explicit AttendingRun(Attending& asked);

    // Whoever brings a row of the run says where it lies; any thread may.
    void here(int64_t number, const uint8_t* row) {
        __atomic_store_n(asked_.selected->addresses + asked_.start + number,
                         uint64_t(reinterpret_cast<uintptr_t>(row)), __ATOMIC_RELEASE);
    }

    // Attends to what is here.
    void advance();

    // Attends to what is left and brings the state up to date, where all rows are here.
    void end();

private:
    Attending& asked_;
    const AttentionKernels& kernels_;
    std::vector<float> query_;
    const Attention attention_;
    ComingRows rows_;
};

}  // namespace hillinfer
