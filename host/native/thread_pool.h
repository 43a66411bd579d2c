// SPDX-License-Identifier: Apache-2.0
// Threads that are kept from one call to the next.
#pragma once
#include <cstdint>
#include <functional>

namespace hillinfer {

// Runs `work(item, worker)` for every item below `items` on up to `threads` threads, the caller's
// among them; worker is below `threads`. A second call at the same time runs on its caller alone:
// the machine's cores are taken.
void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work);

}  // namespace hillinfer
