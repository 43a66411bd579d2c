// SPDX-License-Identifier: Apache-2.0
#include "idle_rows.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

#include "api.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

constexpr int64_t kTokens = 64;
// A group takes a tenth of this where its thread has a core.
constexpr std::chrono::microseconds kLooks{100};

}  // namespace

OfferedRows::OfferedRows(const CheckedRows* given, int64_t count) : rows_(given, given + count) {
    for (const CheckedRows& own : rows_) {
        groups_ += own.states.tokens / kTokens;
    }
    done_.reset(new std::atomic<uint8_t>[size_t(groups_)]());
}

bool OfferedRows::place_next() {
    const int64_t group = next_.fetch_add(1, std::memory_order_relaxed);
    if (group >= groups_) {
        return false;
    }
    place(group);
    return true;
}

void OfferedRows::place_rest(int threads) {
    const int64_t left = std::max<int64_t>(0, groups_ - next_.load());
    if (left) {
        run_parallel(int(std::min<int64_t>(threads, left)), left,
                     [&](int64_t, int) { place_next(); });
    }
    const auto stop = std::chrono::steady_clock::now() + kLooks;
    while (!is_done() && std::chrono::steady_clock::now() < stop) {
        sched_yield();
    }
    for (int64_t group = 0; group < groups_ && !is_done(); ++group) {
        if (!done_[size_t(group)].load()) {
            place(group);
        }
    }
}

void OfferedRows::place(int64_t group) {
    int64_t own = group;
    size_t part = 0;
    for (; own >= rows_[part].states.tokens / kTokens; ++part) {
        own -= rows_[part].states.tokens / kTokens;
    }
    land_group(rows_[part], own);
    if (!done_[size_t(group)].exchange(1)) {
        done_count_.fetch_add(1);
    }
}

// A thread that has a core only while nobody else wants it: whoever wakes takes it at once.
class IdleThread {
public:
    // Where there is no such thread they wait for `place_rest`.
    void offer(OfferedRows& rows) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            start();
            offered_.push_back(&rows);
        }
        changed_.notify_all();
    }

    // Without the mutex: whoever waits and is not told looks again.
    void tell() { changed_.notify_all(); }

    bool await(OfferedRows& rows, std::chrono::milliseconds most) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, most, [&] { return rows.is_done(); });
    }

    bool end(OfferedRows& rows, std::chrono::milliseconds most) {
        std::unique_lock<std::mutex> lock(mutex_);
        forget(rows);
        // It ends the group that it has begun, at most.
        rows.next_.store(rows.groups_);
        return changed_.wait_for(lock, most, [&] { return !rows.is_visited_; });
    }

private:
    void start() {
#ifdef SCHED_IDLE
        if (is_started_) {
            return;
        }
        // A signal is for a thread that somebody interrupts, never for this one.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        is_started_ = !pthread_create(&thread, nullptr, enter, this);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (is_started_) {
            pthread_detach(thread);
        }
#endif
    }

    static void* enter(void* self) {
#ifdef SCHED_IDLE
        const sched_param none{};
        // Of this thread alone. Where that is refused it takes a core from those that compute.
        sched_setscheduler(0, SCHED_IDLE, &none);
#endif
        static_cast<IdleThread*>(self)->work();
        return nullptr;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return !offered_.empty(); });
            OfferedRows& own = *offered_.front();
            own.is_visited_ = true;
            lock.unlock();
            while (own.place_next()) {
            }
            lock.lock();
            own.is_visited_ = false;
            forget(own);
            // Whoever is told takes the core, and must not find the mutex taken.
            lock.unlock();
            changed_.notify_all();
            lock.lock();
        }
    }

    void forget(OfferedRows& rows) {
        const auto place = std::find(offered_.begin(), offered_.end(), &rows);
        if (place != offered_.end()) {
            offered_.erase(place);
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    // In the order in which somebody will wait for them.
    std::deque<OfferedRows*> offered_;
    bool is_started_ = false;
};

namespace {

// Never destroyed: its thread may still wait while the process ends.
IdleThread* idle = nullptr;
std::once_flag once;

void make_idle() { idle = new (std::nothrow) IdleThread; }

IdleThread* the_idle() {
    std::call_once(once, [] {
        make_idle();
        // A forked child has none of its parent's threads.
        pthread_atfork(nullptr, nullptr, make_idle);
    });
    return idle;
}

}  // namespace
}  // namespace hillinfer

// Null where there is no memory for it; else `hillinfer_end_offer` must follow until that succeeds.
HILLINFER_API void* hillinfer_offer_rows(const hillinfer::CheckedRows* given, int64_t count) {
    hillinfer::OfferedRows* own = nullptr;
    hillinfer::IdleThread* const thread = hillinfer::the_idle();
    const int32_t failed = hillinfer::guarded([&] {
        if (!thread) {
            throw std::bad_alloc();
        }
        own = new hillinfer::OfferedRows(given, count);
        thread->offer(*own);
    });
    if (failed) {
        delete own;
        own = nullptr;
    }
    return own;
}

HILLINFER_API void hillinfer_place_offered(void* rows, int32_t threads) {
    static_cast<hillinfer::OfferedRows*>(rows)->place_rest(threads);
    hillinfer::the_idle()->tell();
}

// Whether all of it is placed, so many milliseconds later at most.
HILLINFER_API int32_t hillinfer_await_offered(void* rows, int32_t milliseconds) {
    return hillinfer::the_idle()->await(*static_cast<hillinfer::OfferedRows*>(rows),
                                        std::chrono::milliseconds(milliseconds));
}

// Whether nobody uses what it points to any more, so many milliseconds later at most; it is gone then.
HILLINFER_API int32_t hillinfer_end_offer(void* rows, int32_t milliseconds) {
    hillinfer::OfferedRows* const own = static_cast<hillinfer::OfferedRows*>(rows);
    if (!hillinfer::the_idle()->end(*own, std::chrono::milliseconds(milliseconds))) {
        return 0;
    }
    delete own;
    return 1;
}
