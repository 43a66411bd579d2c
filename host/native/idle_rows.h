// SPDX-License-Identifier: Apache-2.0
// A list of groups of rows that idle cores check and place, and whoever waits for them ends.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "state_rows.h"

namespace hillinfer {

// Rows of whole groups, each of which is placed at least once and perhaps twice, by two threads that
// write the same. What they point to stays until the offer is ended.
class OfferedRows {
public:
    OfferedRows(const CheckedRows* given, int64_t count);

    // Places a group that nobody has begun; false where there is none.
    bool place_next();

    // Places what is left by so many threads, the caller's among them, and what another has begun
    // and not ended: that one may wait for a core for as long as others compute.
    void place_rest(int threads);

    bool is_done() const { return done_count_.load() == groups_; }

private:
    friend class IdleThread;

    void place(int64_t group);

    const std::vector<CheckedRows> rows_;
    int64_t groups_ = 0;
    std::unique_ptr<std::atomic<uint8_t>[]> done_;
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> done_count_{0};
    // Under the thread's mutex.
    bool is_visited_ = false;
};

}  // namespace hillinfer
