// SPDX-License-Identifier: Apache-2.0
// Threads that are kept from one call to the next.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace hillinfer {

// No machine has as many cores that memory could feed; more threads than these are never used.
constexpr int kMostThreads = 1024;

// Runs `work(item, worker)` for every item below `items` on up to `threads` threads, the caller's
// among them; worker is below `threads`. A second call at the same time runs on its caller alone:
// the machine's cores are taken. Where the system gives no more threads, or they come too late,
// fewer do the work.
void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work);

// Wakes the threads of the last call, if any, for one that comes in a moment: to wake takes as long
// as many a call. Does nothing where none came since this was called the last time.
void expect_parallel();

class Pool;

// What one of these threads does while whoever began it goes on. It must not throw.
class Errand {
public:
    explicit Errand(std::function<void()> work) : work_(std::move(work)) {}
    Errand(const Errand&) = delete;
    Errand& operator=(const Errand&) = delete;

    // Has it done as soon as a thread is free; `end` must follow.
    void begin();

    // Returns once it is done: by the caller, where no thread has begun.
    void end();

private:
    friend class Pool;

    std::function<void()> work_;
    std::atomic<bool> done_{false};
    Pool* pool_ = nullptr;
};

// How many of `threads` so many bytes of memory are worth.
int worthwhile_threads(int threads, int64_t bytes);

}  // namespace hillinfer
