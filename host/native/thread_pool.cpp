// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace hillinfer {
namespace {

class Pool {
public:
    void run(int threads, int64_t items, const std::function<void(int64_t, int)>& work) {
        const int helpers = grow(threads - 1);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            items_ = items;
            next_.store(0, std::memory_order_relaxed);
            wanted_ = helpers;
            running_ = wanted_;
            ++round_;
        }
        start_.notify_all();
        take_items(work, items, 0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return running_ == 0; });
        work_ = nullptr;
    }

    std::mutex in_use;

private:
    // Returns how many of so many helpers there are: where the system gives no more threads or no
    // memory for one, those that exist and the caller do the work.
    int grow(int helpers) {
        try {
            while (started_ < helpers) {
                // A new thread must not take part in a round that ended before it came.
                std::thread([this, number = started_, round = round_] { help(number, round); })
                    .detach();
                ++started_;
            }
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
        return std::min(started_, helpers);
    }

    void help(int number, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            start_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (number >= wanted_) {
                continue;
            }
            const auto* work = work_;
            const int64_t items = items_;
            lock.unlock();
            take_items(*work, items, number + 1);
            lock.lock();
            if (--running_ == 0) {
                done_.notify_one();
            }
        }
    }

    void take_items(const std::function<void(int64_t, int)>& work, int64_t items, int worker) {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) {
            work(item, worker);
        }
    }

    int started_ = 0;
    std::mutex mutex_;
    std::condition_variable start_;
    std::condition_variable done_;
    std::atomic<int64_t> next_{0};
    const std::function<void(int64_t, int)>* work_ = nullptr;
    int64_t items_ = 0;
    uint64_t round_ = 0;
    int wanted_ = 0;
    int running_ = 0;
};

// Never destroyed: its threads may still wait while the process ends.
Pool* pool = nullptr;
std::once_flag once;

// Without memory for it every call runs on its caller alone.
void make_pool() { pool = new (std::nothrow) Pool; }

}  // namespace

int threads_for(int64_t bytes, int threads) {
    constexpr int64_t kBytesPerThread = 1 << 20;
    return int(std::clamp<int64_t>(bytes / kBytesPerThread, 1, std::max(threads, 1)));
}

void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work) {
    threads = int(std::min<int64_t>(std::min(threads, kMostThreads), items));
    if (threads > 1) {
        std::call_once(once, [] {
            make_pool();
            // A forked child has none of its parent's threads.
            pthread_atfork(nullptr, nullptr, make_pool);
        });
        Pool* const own = pool;
        std::unique_lock<std::mutex> in_use;
        if (own) {
            in_use = std::unique_lock<std::mutex>(own->in_use, std::try_to_lock);
        }
        if (in_use.owns_lock()) {
            own->run(threads, items, work);
            return;
        }
    }
    for (int64_t item = 0; item < items; ++item) {
        work(item, 0);
    }
}

}  // namespace hillinfer
