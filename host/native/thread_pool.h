// SPDX-License-Identifier: Apache-2.0
// Threads that are kept from one call to the next.
#pragma once
#include <cstdint>
#include <functional>

namespace hillinfer {

// No machine has as many cores that memory could feed; more threads than these are never used.
constexpr int kMostThreads = 1024;

// Runs `work(item, worker)` for every item below `items` on up to `threads` threads, the caller's
// among them; worker is below `threads`. A second call at the same time runs on its caller alone:
// the machine's cores are taken. Where the system gives no more threads, fewer do the work.
void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work);

// How many of `threads` so many bytes of memory are worth. To wake one, and to wait for it where
// others keep the cores busy, takes as long as to read a good part of a cache.
int worthwhile_threads(int threads, int64_t bytes);

}  // namespace hillinfer
