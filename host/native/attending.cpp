// SPDX-License-Identifier: Apache-2.0
#include "attending.h"

#include <chrono>

#include "api.h"

namespace hillinfer {
namespace {

class Timed {
public:
    explicit Timed(int64_t& total) : total_(total), begun_(std::chrono::steady_clock::now()) {}
    ~Timed() {
        total_ += (std::chrono::steady_clock::now() - begun_) / std::chrono::nanoseconds(1);
    }

private:
    int64_t& total_;
    const std::chrono::steady_clock::time_point begun_;
};

}  // namespace

AttendingRun::AttendingRun(Attending& asked)
    : asked_(asked),
      kernels_(*attention_kernels(asked.variant)),
      attention_(attention_of(*asked.step, query_)),
      rows_((asked.is_begun ? void() : begin_attention(kernels_, attention_, asked.state),
             ComingRows(kernels_, attention_, asked.state, asked.selected->addresses,
                        coming_sets(*asked.selected, asked.start, asked.start + asked.count),
                        asked.kept))) {}

void AttendingRun::advance() {
    const Timed timed(asked_.nanoseconds);
    rows_.advance();
}

void AttendingRun::end() {
    const Timed timed(asked_.nanoseconds);
    rows_.advance();
    if (!rows_.end()) {
        return;
    }
    asked_.is_begun = asked_.is_done = 1;
    if (asked_.out) {
        attention_result(kernels_, attention_, asked_.state, asked_.out);
    }
}

}  // namespace hillinfer

// Attends to a run whose rows are all here.
HILLINFER_API int32_t hillinfer_attend_run(hillinfer::Attending* asked) {
    return hillinfer::guarded([&] { hillinfer::AttendingRun(*asked).end(); });
}
