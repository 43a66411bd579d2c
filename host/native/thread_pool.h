// SPDX-License-Identifier: Apache-2.0
// Threads that are kept from one call to the next.
#pragma once
#include <cstdint>
#include <functional>

namespace hillinfer {

// No machine has as many cores that memory could feed; more threads than these are never used.
constexpr int kMostThreads = 1024;

// As many of `threads` as work over so many bytes is worth: waking one that sleeps takes as long as
// reading some hundred kilobytes, and on a busy machine many times that.
int threads_for(int64_t bytes, int threads);

// Runs `work(item, worker)` for every item below `items` on up to `threads` threads, the caller's
// among them; worker is below `threads`. A second call at the same time runs on its caller alone:
// the machine's cores are taken. Where the system gives no more threads, fewer do the work.
void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work);

}  // namespace hillinfer
