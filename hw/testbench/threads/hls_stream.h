// SPDX-License-Identifier: Apache-2.0
// Bounded streams between threads, with the interface of the vendor's hls::stream.
//
// For the threaded simulation: it stands in front of the vendor's header on the include path and
// gives every stream the depth that its STREAM pragma names (stream_depths.h is made from those).
// A thread that cannot go on waits; when all of them wait nothing can ever change again, so the
// region is deadlocked: the streams and what is waited for are printed, and every thread ends.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "stream_depths.h"

namespace hls_threads {

struct Deadlock {};

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

inline int depth_of(const char *name) {
    for (const auto &entry : STREAM_DEPTHS) {
        if (std::strcmp(entry.name, name) == 0) return entry.depth;
    }
    std::cout << "stream " << name << " has no STREAM pragma" << std::endl;
    return 1;
}

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

namespace hls {

template <typename T>
class stream {
  public:
    explicit stream(const char *name) : name_(name), depth_(hls_threads::depth_of(name)) {
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
        region_.conditions.pop_back();
        region_.conditions.pop_back();
    }

    stream(const stream &) = delete;

    T read() {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (data_.empty()) wait(lock, reader_waits_, readable_);
        return take();
    }

    bool read_nb(T &value) {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (data_.empty()) return false;
        value = take();
        return true;
    }

    void write(const T &value) {
        std::unique_lock<std::mutex> lock(region_.mutex);
        if (int(data_.size()) == depth_) wait(lock, writer_waits_, writable_);
        data_.push_back(value);
        wake(reader_waits_, readable_);
    }

  private:
    T take() {
        const T value = data_.front();
        data_.pop_front();
        wake(writer_waits_, writable_);
        return value;
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
        if (!reader_waits_ && !writer_waits_) return "";
        return std::string(" ") + name_ + " is " + state + " (" + std::to_string(data_.size()) +
               " of " + std::to_string(depth_) + ", its " +
               (reader_waits_ ? "reader" : "writer") + " waits);";
    }

    hls_threads::Region &region_ = hls_threads::Region::current();
    const char *name_;
    const int depth_;
    std::deque<T> data_;
    bool reader_waits_ = false;
    bool writer_waits_ = false;
    bool died_ = false;
    std::condition_variable readable_;
    std::condition_variable writable_;
};

}  // namespace hls

#define HLS_THREADS_JOIN(a, b) a##b
#define HLS_THREADS_NAME(a, b) HLS_THREADS_JOIN(a, b)
#define PROCESS(...) hls_threads::Process HLS_THREADS_NAME(process_, __LINE__)([&] { __VA_ARGS__; })
