// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "exact_floats.h"

namespace hillinfer {
namespace {

// A helper looks for work so long before it sleeps, and whoever called waits so long for helpers
// before it does: the parts of a decode step follow on each other sooner, and to sleep and be woken
// takes as long as one of them. Meanwhile whoever else has work on this core has it first: threads that
// bring rows from the drive would wait for one that has nothing to do.
constexpr std::chrono::microseconds kLooks{200};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Looks until `seen()` or time is up; returns whether it was seen.
template <class Seen>
bool look(Seen seen) {
    constexpr int kPauses = 16;
    const auto stop = std::chrono::steady_clock::now() + kLooks;
    do {
        for (int i = 0; i < kPauses; ++i) {
            if (seen()) {
                return true;
            }
            pause();
        }
        sched_yield();
    } while (std::chrono::steady_clock::now() < stop);
    return seen();
}

// What helpers look at, in one word: the round, how many of them it wants, whether it takes any
// more, and how many are at work in it.
class Gate {
public:
    static constexpr uint64_t kOne = 1;
    static constexpr uint64_t kOpen = 1u << 16;
    static constexpr int kWantedShift = 17;
    static constexpr int kRoundShift = 32;

    static uint32_t round(uint64_t word) { return uint32_t(word >> kRoundShift); }
    static int wanted(uint64_t word) { return int(word >> kWantedShift & 0x7FFF); }
    static int at_work(uint64_t word) { return int(word & 0xFFFF); }

    uint64_t word() const { return word_.load(); }

    // Only while nobody is at work.
    void open(int wanted) {
        const uint64_t next = uint64_t(round(word()) + 1) << kRoundShift;
        word_.store(next | uint64_t(wanted) << kWantedShift | kOpen);
    }

    void close() { word_.fetch_and(~kOpen); }

    bool enter(int number, uint32_t of) {
        uint64_t known = word();
        while (known & kOpen && round(known) == of && number < wanted(known)) {
            if (word_.compare_exchange_weak(known, known + kOne)) {
                return true;
            }
        }
        return false;
    }

    // Whether nobody is at work any more, nor comes.
    bool leave() {
        const uint64_t before = word_.fetch_sub(kOne);
        return at_work(before) == 1 && !(before & kOpen);
    }

private:
    std::atomic<uint64_t> word_{0};
};

// What threads wait for; others make it true and then tell.
class Event {
public:
    template <class Seen>
    void wait(Seen seen) {
        if (!look(seen)) {
            std::unique_lock<std::mutex> lock(mutex_);
            waiting_.fetch_add(1);
            told_.wait(lock, seen);
            waiting_.fetch_sub(1);
        }
    }

    void tell() {
        if (waiting_.load()) {
            // It waits now, or has not looked for the last time.
            { const std::lock_guard<std::mutex> lock(mutex_); }
            told_.notify_all();
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable told_;
    std::atomic<int> waiting_{0};
};

// A thread's bed.
struct Helper {
    std::mutex mutex;
    std::condition_variable ready;
    std::atomic<bool> asleep{false};
    bool called = false;

    void wake() {
        // Between looking at the gate for the last time and being asleep it says that it is.
        if (asleep.load()) {
            {
                const std::lock_guard<std::mutex> lock(mutex);
                asleep.store(false);
                called = true;
            }
            ready.notify_one();
        }
    }

    template <class Seen>
    void sleep(Seen seen) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.store(true);
        ready.wait(lock, [&] { return called || seen(); });
        asleep.store(false);
        called = false;
    }
};

}  // namespace

class Pool {
public:
    void run(int threads, int64_t items, const std::function<void(int64_t, int)>& work) {
        const int helpers = grow(threads - 1);
        work_ = &work;
        items_ = items;
        next_.store(0);
        gate_.open(helpers);
        wake(helpers);
        take_items(work, items, 0);
        // Nothing is left for a helper that has not come yet, and nobody waits for it.
        gate_.close();
        finished_.wait([&] { return Gate::at_work(gate_.word()) == 0; });
        expected_.store(false);
    }

    void expect() {
        if (!expected_.exchange(true)) {
            wake(std::min(Gate::wanted(gate_.word()), started_.load()));
        }
    }

    void begin(Errand& errand) {
        {
            const std::lock_guard<std::mutex> lock(errands_mutex_);
            errands_.push_back(&errand);
            errand_count_.store(int(errands_.size()));
        }
        if (!started_.load()) {
            const std::unique_lock<std::mutex> lock(in_use, std::try_to_lock);
            if (lock.owns_lock()) {
                grow(1);
            }
        }
        wake(std::min(started_.load(), 1));
    }

    // Whether no thread has begun it, nor will.
    bool take_back(Errand& errand) {
        const std::lock_guard<std::mutex> lock(errands_mutex_);
        const auto place = std::find(errands_.begin(), errands_.end(), &errand);
        if (place == errands_.end()) {
            return false;
        }
        errands_.erase(place);
        errand_count_.store(int(errands_.size()));
        return true;
    }

    void wait(const Errand& errand) {
        ended_.wait([&] { return errand.done_.load(); });
    }

    std::mutex in_use;

private:
    // Returns how many of so many helpers there are: where the system gives no more threads or no
    // memory for one, those that exist and the caller do the work.
    int grow(int helpers) {
        int started = started_.load();
        try {
            while (started < helpers) {
                Helper* const own = new Helper;
                helpers_[started].store(own);
                std::thread([this, own, number = started, seen = Gate::round(gate_.word())] {
                    help(*own, number, seen);
                }).detach();
                started_.store(++started);
            }
        } catch (const std::system_error&) {
            delete helpers_[started].exchange(nullptr);
        } catch (const std::bad_alloc&) {
        }
        return std::min(started, helpers);
    }

    void wake(int helpers) {
        for (int i = 0; i < helpers; ++i) {
            helpers_[i].load()->wake();
        }
    }

    void help(Helper& own, int number, uint32_t seen) {
        const ExactFloats exact;
        bool looks = true;
        while (true) {
            // Errands are the first one's: the others need not look at two things.
            const auto comes = [&] {
                return Gate::round(gate_.word()) != seen || (number == 0 && errand_count_.load());
            };
            while (!(looks ? look(comes) : comes())) {
                own.sleep(comes);
                looks = true;
            }
            const uint32_t round = Gate::round(gate_.word());
            looks = round != seen;
            if (round != seen) {
                seen = round;
                if (gate_.enter(number, seen)) {
                    take_items(*work_, items_, number + 1);
                    if (gate_.leave()) {
                        finished_.tell();
                    }
                }
            } else {
                // The next one comes in a layer's time: others are to have the core until then.
                run_errand();
            }
        }
    }

    void run_errand() {
        Errand* own = nullptr;
        {
            const std::lock_guard<std::mutex> lock(errands_mutex_);
            if (!errands_.empty()) {
                own = errands_.front();
                errands_.pop_front();
                errand_count_.store(int(errands_.size()));
            }
        }
        if (own) {
            own->work_();
            // From here on whoever began it may take its memory back.
            own->done_.store(true);
            ended_.tell();
        }
    }

    void take_items(const std::function<void(int64_t, int)>& work, int64_t items, int worker) {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) {
            work(item, worker);
        }
    }

    std::atomic<int> started_{0};
    std::atomic<Helper*> helpers_[kMostThreads] = {};
    Event finished_;
    Event ended_;
    std::atomic<bool> expected_{true};
    std::mutex errands_mutex_;
    std::deque<Errand*> errands_;
    const std::function<void(int64_t, int)>* work_ = nullptr;
    int64_t items_ = 0;
    alignas(64) Gate gate_;
    std::atomic<int> errand_count_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

namespace {

// Never destroyed: its threads may still wait while the process ends.
std::atomic<Pool*> pool{nullptr};
std::once_flag once;

// Without memory for it every call runs on its caller alone.
void make_pool() { pool.store(new (std::nothrow) Pool); }

Pool* the_pool() {
    std::call_once(once, [] {
        make_pool();
        // A forked child has none of its parent's threads.
        pthread_atfork(nullptr, nullptr, make_pool);
    });
    return pool.load();
}

// A second thread for 1 MiB: with fewer selected rows it gains nothing on two cores that share no cache.
constexpr int64_t kThreadBytes = 512 << 10;

}  // namespace

int worthwhile_threads(int threads, int64_t bytes) {
    return int(std::clamp<int64_t>(bytes / kThreadBytes, 1, std::max(threads, 1)));
}

void expect_parallel() {
    if (Pool* const own = pool.load()) {
        own->expect();
    }
}

void Errand::begin() {
    pool_ = the_pool();
    if (pool_) {
        pool_->begin(*this);
    }
}

void Errand::end() {
    // In a forked child nobody else does it, whoever had begun.
    if (pool_ && pool_ == pool.load() && !pool_->take_back(*this)) {
        pool_->wait(*this);
        return;
    }
    work_();
}

void run_parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work) {
    threads = int(std::min<int64_t>(std::min(threads, kMostThreads), items));
    if (threads > 1) {
        Pool* const own = the_pool();
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
