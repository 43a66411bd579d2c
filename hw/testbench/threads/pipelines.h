// SPDX-License-Identifier: Apache-2.0
// Pipelines of the threaded simulation: rounds, writes that leave stages later, distances.
//
// A pipelined loop writes its streams in different stages, and which ones is the synthesis tool's
// choice. Here every stream has a skew: what a round writes leaves so many rounds later. As in a
// pipeline that stalls, a write that finds its stream full stops everything behind it, and a round
// that waits for input keeps back what is inside. The builder of the simulation puts `Pipeline` and
// `next_round` where it finds PIPELINE pragmas, and `Watched` where it finds DEPENDENCE pragmas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace hls_threads {

constexpr int LARGEST_SKEW = 32;

// What a test chose: a seed that gives every stream a skew of its own, and skews by name.
struct Skews {
    uint32_t seed = 0;  // 0: none
    std::map<std::string, int> chosen;

    static Skews &current() {
        static Skews skews;
        return skews;
    }

    int of(const std::string &name) const {
        const auto found = chosen.find(name);
        if (found != chosen.end()) return found->second;
        if (seed == 0) return 0;
        // FNV-1a over seed and name, with its bits mixed once more.
        uint32_t hash = 2166136261u ^ (seed * 2654435761u);
        for (const char letter : name) hash = (hash ^ uint8_t(letter)) * 16777619u;
        hash ^= hash >> 15;
        hash *= 2246822519u;
        hash ^= hash >> 13;
        return int(hash % (LARGEST_SKEW + 1));
    }
};

struct PendingWrite {
    int64_t due;  // round
    std::function<void()> write;
};

// The pipeline of the thread, between its loop's first round and its end.
struct Stages {
    bool pipelined = false;
    int64_t round = 0;
    std::vector<PendingWrite> pending;  // by round and, within one, in order of the program

    static Stages &current() {
        thread_local Stages stages;
        return stages;
    }

    void put(int skew, std::function<void()> write) {
        const int64_t due = round + skew;
        const auto later = [](int64_t value, const PendingWrite &one) { return value < one.due; };
        pending.insert(std::upper_bound(pending.begin(), pending.end(), due, later),
                       PendingWrite{due, std::move(write)});
    }

    // Writes all that is due; one that waits keeps the others waiting.
    void leave(int64_t until) {
        while (!pending.empty() && pending.front().due <= until) {
            const std::function<void()> write = std::move(pending.front().write);
            pending.erase(pending.begin());
            write();
        }
    }
};

// Around a pipelined loop, as `for (Pipeline pipeline; pipeline.once();)`.
class Pipeline {
  public:
    Pipeline() { Stages::current().pipelined = true; }

    // A loop that ends empties its pipeline before the process goes on.
    ~Pipeline() noexcept(false) {
        Stages &stages = Stages::current();
        stages.pipelined = false;
        if (std::uncaught_exception()) {
            stages.pending.clear();
            return;
        }
        stages.leave(stages.round + LARGEST_SKEW);
    }

    Pipeline(const Pipeline &) = delete;

    bool once() {
        const bool first = first_;
        first_ = false;
        return first;
    }

  private:
    bool first_ = true;
};

inline void next_round() {
    Stages &stages = Stages::current();
    ++stages.round;
    stages.leave(stages.round);
}

// A memory of which the source says how many rounds lie between a write and the read of it.
template <typename T, int DISTANCE>
class Watched {
  public:
    Watched &operator=(const T &value) {
        value_ = value;
        written_ = Stages::current().round;
        return *this;
    }

    operator const T &() const {
        const int64_t rounds = Stages::current().round - written_;
        if (rounds < DISTANCE) {
            std::cout << "a memory is read " << rounds << " rounds after it was written, and its "
                      << "DEPENDENCE pragma says " << DISTANCE << std::endl;
        }
        return value_;
    }

  private:
    T value_;
    int64_t written_ = -DISTANCE;
};

template <typename T, size_t LENGTH, int DISTANCE>
class Watched<T[LENGTH], DISTANCE> {
  public:
    Watched<T, DISTANCE> &operator[](size_t place) { return parts_[place]; }

  private:
    Watched<T, DISTANCE> parts_[LENGTH];
};

}  // namespace hls_threads

// For the caller of the library: a seed for all streams, 0 for none.
extern "C" void set_skew_seed(uint32_t seed) { hls_threads::Skews::current().seed = seed; }

// The skew of one stream, whatever the seed; -1 goes back to the seed's.
extern "C" void set_stream_skew(const char *name, int skew) {
    if (skew < 0) {
        hls_threads::Skews::current().chosen.erase(name);
    } else {
        hls_threads::Skews::current().chosen[name] = skew;
    }
}
