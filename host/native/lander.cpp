// SPDX-License-Identifier: Apache-2.0
#include "lander.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <memory>

#include "api.h"
#include "awaited.h"
#include "ring.h"

namespace hillinfer {
namespace {

// The clock that Python's `perf_counter_ns` reads.
int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

Lander::Lander(uint32_t depth) : depth_(depth), process_(getpid()) {
    // A signal is for a thread that somebody interrupts, never for this one.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    // Whoever looks at open files from here on sees all of them.
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return is_open_; });
}

Lander::~Lander() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
    }
    begun_.notify_all();
    thread_.join();
}

bool Lander::is_elsewhere() const { return getpid() != process_; }

void Lander::begin(LandingErrand* errand) { add(errand, line_); }

void Lander::begin_first(LandingErrand* errand) { add(errand, first_); }

void Lander::add(LandingErrand* errand, std::list<LandingErrand*>& line) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        line.push_back(errand);
        errand->is_done = 0;
        look();
        if (!has_work()) {
            return;
        }
    }
    begun_.notify_one();
}

void Lander::hold(bool held) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_ = held;
        look();
        if (!has_work()) {
            return;
        }
    }
    begun_.notify_one();
}

void Lander::wait(const LandingErrand* errand) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    look();
    if (has_work()) {
        begun_.notify_one();
    }
    done_.wait(lock, [&] { return errand->is_done != 0; });
    --waiting_;
    look();
}

void Lander::run() {
    const ExactFloats exact;
    // Of this thread: nobody else may hand reads over to it.
    std::unique_ptr<Ring> ring;
    // A shallower one where the system gives none so deep.
    for (uint32_t depth = depth_; depth && !ring; depth /= 4) {
        int error = 0;
        ring.reset(Ring::open(depth, &error));
    }
    std::unique_lock<std::mutex> lock(mutex_);
    is_open_ = true;
    done_.notify_all();
    while (true) {
        begun_.wait(lock, [&] { return has_work() || ended_; });
        std::list<LandingErrand*>& line = first_.empty() ? line_ : first_;
        if (line.empty()) {
            return;
        }
        // Its place, so that none is to be made for it should it give way.
        std::list<LandingErrand*> own;
        own.splice(own.begin(), line, line.begin());
        LandingErrand& next = *own.front();
        look();
        const std::atomic<bool>* const gives_way = &line == &line_ ? &is_hurried_ : nullptr;
        lock.unlock();
        ReadWay way = next.way;
        way.ring = ring.get();
        int32_t outcome = kDone;
        next.started_ns = next.started_ns ? next.started_ns : now();
        const int32_t failed = guarded([&] { outcome = land(way, *next.landing, gives_way); });
        next.stopped_ns = now();
        next.outcome = failed ? failed : outcome;
        lock.lock();
        const Landing& landing = *next.landing;
        if (!next.outcome && !landing.missing && landing.landed < landing.count) {
            // It gave way, and goes on where it was.
            line_.splice(line_.begin(), own);
            continue;
        }
        next.is_done = 1;
        done_.notify_all();
    }
}

bool arrive(Awaited& coming) {
    coming.is_over = coming.is_whole = 0;
    if (coming.lander->is_elsewhere()) {
        return false;
    }
    const int64_t started = now();
    coming.lander->wait(coming.errand);
    coming.nanoseconds = now() - started;
    coming.is_over = 1;
    const Landing& landing = *coming.errand->landing;
    coming.is_whole = coming.errand->outcome == kDone && landing.landed == landing.count &&
                      landing.wrong < 0;
    return coming.is_whole;
}

}  // namespace hillinfer

using namespace hillinfer;

// A thread that lands rows; see lander.h.
HILLINFER_API int32_t hillinfer_lander_open(uint32_t depth, void** out) {
    return guarded([&] { *out = new Lander(depth); });
}

// Takes microseconds.
HILLINFER_API int32_t hillinfer_lander_begin(void* lander, LandingErrand* errand) {
    Lander* const own = static_cast<Lander*>(lander);
    return own->is_elsewhere() ? kFailed : guarded([&] { own->begin(errand); });
}

// Before those that nobody waits for.
HILLINFER_API int32_t hillinfer_lander_begin_first(void* lander, LandingErrand* errand) {
    Lander* const own = static_cast<Lander*>(lander);
    return own->is_elsewhere() ? kFailed : guarded([&] { own->begin_first(errand); });
}

HILLINFER_API void hillinfer_lander_hold(void* lander, int32_t held) {
    Lander* const own = static_cast<Lander*>(lander);
    if (!own->is_elsewhere()) {
        own->hold(held);
    }
}

HILLINFER_API void hillinfer_lander_wait(void* lander, const LandingErrand* errand) {
    Lander* const own = static_cast<Lander*>(lander);
    if (!own->is_elsewhere()) {
        own->wait(errand);
    }
}

HILLINFER_API void hillinfer_lander_close(void* lander) {
    Lander* const own = static_cast<Lander*>(lander);
    if (!own->is_elsewhere()) {
        delete own;
    }
}
