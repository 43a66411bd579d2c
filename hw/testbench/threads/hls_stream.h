// SPDX-License-Identifier: Apache-2.0
// Bounded streams between threads, with the interface of the vendor's hls::stream.
//
// For the threaded simulation: it stands in front of the vendor's header on the include path and
// gives every stream the depth that its STREAM pragma names (stream_depths.h is made from those).
// A thread that cannot go on waits; when all of them wait nothing can ever change again, so the
// region is deadlocked: the streams and what is waited for are printed, and every thread ends.
//
// A process that polls (read_nb) waits as well once it has polled in vain often enough without any
// other use of a stream in between, and nothing is left in its pipeline: until one of the streams
// it polled has data.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pipelines.h"
#include "stream_depths.h"

namespace hls_threads {

struct Deadlock {};

// Polls in vain after which a process is taken to do nothing else. A process that works on what it
// has polls up to three streams beside it, for 16 rounds at most (the score unit of wide heads).
constexpr size_t IDLE_POLLS = 128;

// One lock for all: exactness of the deadlock check matters here, speed does not.
struct Region {
    std::mutex mutex;
    std::condition_variable ended;
    std::vector<std::function<std::string()> > streams;
    int live = 0;
    int waiting = 0;
    bool complete = false;  // all processes are started
    bool dead = false;

    static Region &current() {
        static Region region;
        return region;
    }

    // With the lock held.
    void check() {
        if (!complete || dead || live == 0 || waiting < live) return;
        dead = true;
        std::cout << "DEADLOCK: every process that is not done waits;";
        for (const auto &describe : streams) std::cout << describe();
        std::cout << std::endl;
        for (auto *condition : conditions) condition->notify_all();
    }

    std::vector<std::condition_variable *> conditions;
};

// Depths that a test sets in place of those of the pragmas.
inline std::map<std::string, int> &set_depths() {
    static std::map<std::string, int> depths;
    return depths;
}

inline int depth_of(const char *name) {
    const auto set = set_depths().find(name);
    if (set != set_depths().end()) return set->second;
    for (const auto &entry : STREAM_DEPTHS) {
        if (std::strcmp(entry.name, name) == 0) return entry.depth;
    }
    std::cout << "stream " << name << " has no STREAM pragma" << std::endl;
    return 1;
}

struct Polling;

// A stream that a process polls.
struct Polled {
    std::function<void(Polling *)> tell;  // it who polls
    std::function<bool()> has_data;
};

// What the process of this thread polled since it last read or wrote anything.
struct Polling {
    size_t polls = 0;
    bool waits = false;
    std::condition_variable condition;
    std::vector<Polled> streams;

    static Polling &current() {
        thread_local Polling polling;
        return polling;
    }

    // With the lock held.
    void forget() {
        polls = 0;
        for (const auto &one : streams) one.tell(nullptr);
        streams.clear();
    }

    // With the lock held; whether one of them has got data since it was polled.
    bool has_missed() const {
        for (const auto &one : streams) {
            if (one.has_data()) return true;
        }
        return false;
    }
};

// Runs one process of the region; the destructor at the end of the region waits for it.
class Process {
  public:
    explicit Process(std::function<void()> work) {
        Region &region = Region::current();
        {
            std::lock_guard<std::mutex> lock(region.mutex);
            ++region.live;
        }
        thread_ = std::thread([work, &region] {
            try {
                work();
            } catch (const Deadlock &) {
            }
            std::lock_guard<std::mutex> lock(region.mutex);
            Polling::current().forget();
            --region.live;
            region.check();
        });
    }

    ~Process() {
        Region &region = Region::current();
        {
            std::lock_guard<std::mutex> lock(region.mutex);
            region.complete = true;
            region.check();
        }
        thread_.join();
        std::lock_guard<std::mutex> lock(region.mutex);
        if (region.live == 0) region.complete = region.dead = false;
    }

    Process(const Process &) = delete;

  private:
    std::thread thread_;
};

}  // namespace hls_threads

// For the caller of the library; depth 0 goes back to the pragma's.
extern "C" void set_stream_depth(const char *name, int depth) {
    if (depth == 0) {
        hls_threads::set_depths().erase(name);
    } else {
        hls_threads::set_depths()[name] = depth;
    }
}

namespace hls {

template <typename T>
class stream {
  public:
    explicit stream(const char *name)
        : name_(name), depth_(hls_threads::depth_of(name)),
          skew_(hls_threads::Skews::current().of(name)) {
        region_.streams.push_back([this] { return describe(); });
        region_.conditions.push_back(&readable_);
        region_.conditions.push_back(&writable_);
    }

    ~stream() {
        if (!data_.empty() && !died_) {
            std::cout << "stream " << name_ << " contains leftover data" << std::endl;
        }
        // Streams of a region are made and destroyed together, in opposite orders.
        region_.streams.pop_back();
        drop(readable_);
        drop(writable_);
    }

    stream(const stream &) = delete;

    T read() {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (data_.empty()) wait(lock, reader_waits_, readable_);
        return take();
    }

    bool read_nb(T &value) {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (data_.empty()) poll(lock);
        if (data_.empty()) return false;
        value = take();
        return true;
    }

    void write(const T &value) {
        hls_threads::Stages &stages = hls_threads::Stages::current();
        if (stages.pipelined && skew_ != 0) {
            stages.put(skew_, [this, value] { write_now(value); });
        } else {
            write_now(value);
        }
    }

  private:
    void write_now(const T &value) {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (int(data_.size()) == depth_) wait(lock, writer_waits_, writable_);
        hls_threads::Polling::current().forget();
        data_.push_back(value);
        wake(reader_waits_, readable_);
        if (poller_ != nullptr) wake(poller_->waits, poller_->condition);
    }

    T take() {
        hls_threads::Polling::current().forget();
        const T value = data_.front();
        data_.pop_front();
        wake(writer_waits_, writable_);
        return value;
    }

    void poll(std::unique_lock<std::mutex> &lock) {
        hls_threads::Polling &polling = hls_threads::Polling::current();
        if (poller_ == nullptr) {
            poller_ = &polling;
            polling.streams.push_back({[this](hls_threads::Polling *who) { poller_ = who; },
                                       [this] { return !data_.empty(); }});
        }
        if (++polling.polls <= hls_threads::IDLE_POLLS) return;
        if (!hls_threads::Stages::current().pending.empty()) return;
        // Nobody told it of data that came while it ran. It finds them, or polls that stream no more:
        // then the next round of polls does not count it.
        if (polling.has_missed()) return polling.forget();
        region_.conditions.push_back(&polling.condition);
        try {
            wait(lock, polling.waits, polling.condition);
        } catch (const hls_threads::Deadlock &) {
            polling.forget();
            drop(polling.condition);
            throw;
        }
        polling.forget();
        drop(polling.condition);
    }

    void drop(const std::condition_variable &condition) {
        auto &all = region_.conditions;
        all.erase(std::find(all.begin(), all.end(), &condition));
    }

    void wait(std::unique_lock<std::mutex> &lock, bool &flag, std::condition_variable &condition) {
        flag = true;
        ++region_.waiting;
        region_.check();
        condition.wait(lock, [&] { return !flag || region_.dead; });
        if (flag) {
            // Only a deadlock leaves the flag set.
            flag = false;
            --region_.waiting;
            died_ = true;
            throw hls_threads::Deadlock();
        }
        // A stream may have been left over by a process that a deadlock ended.
        if (region_.dead) throw hls_threads::Deadlock();
    }

    // The one that is woken counts as running from here on, so that no deadlock is seen too early.
    void wake(bool &flag, std::condition_variable &condition) {
        if (!flag) return;
        flag = false;
        --region_.waiting;
        condition.notify_one();
    }

    std::string describe() const {
        const char *state = int(data_.size()) == depth_ ? "full" : data_.empty() ? "empty" : "";
        const bool polled = poller_ != nullptr && poller_->waits;
        if (!reader_waits_ && !writer_waits_ && !polled) return "";
        return std::string(" ") + name_ + " is " + state + " (" + std::to_string(data_.size()) +
               " of " + std::to_string(depth_) + ", its " +
               (writer_waits_ ? "writer" : "reader") + " waits);";
    }

    hls_threads::Region &region_ = hls_threads::Region::current();
    const char *name_;
    const int depth_;
    const int skew_;
    std::deque<T> data_;
    bool reader_waits_ = false;
    bool writer_waits_ = false;
    bool died_ = false;
    hls_threads::Polling *poller_ = nullptr;
    std::condition_variable readable_;
    std::condition_variable writable_;
};

}  // namespace hls

#define HLS_THREADS_JOIN(a, b) a##b
#define HLS_THREADS_NAME(a, b) HLS_THREADS_JOIN(a, b)
#define PROCESS(...) hls_threads::Process HLS_THREADS_NAME(process_, __COUNTER__)([&] { __VA_ARGS__; })
