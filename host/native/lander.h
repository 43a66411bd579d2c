// SPDX-License-Identifier: Apache-2.0
// A thread that lands rows while its caller does something else.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "file_reads.h"
#include "landing.h"

namespace hillinfer {

// Rows that are to land, and what came of it. Shared with Python, which owns it: the order and types of
// these fields are part of the C interface.
struct LandingErrand {
    ReadWay way;  // Its ring is not looked at.
    Landing* landing;
    int32_t outcome;
    int32_t is_done;  // Also before it begins.
    int64_t started_ns;
    int64_t stopped_ns;
};

// Nothing that it does asks for Python's global lock, which a thread of Python's would wait for before
// and behind each landing, and take from whoever computes.
class Lander {
public:
    // Reads through a ring of so many reads of its own, which is open when this returns; by threads where
    // that is 0 or there is none.
    explicit Lander(uint32_t depth);

    // Ends what stands in line first.
    ~Lander();

    Lander(const Lander&) = delete;
    Lander& operator=(const Lander&) = delete;

    // Has rows landed behind those that stand in line; what the errand points to stays until `wait`.
    void begin(LandingErrand* errand);

    // The same for rows that somebody waits for: before the others, and between the batches of one that
    // is being landed.
    void begin_first(LandingErrand* errand);

    // Returns once an errand is done, or has not begun.
    void wait(const LandingErrand* errand);

    // Lets those that nobody waits for stand still, between two batches too, until it is told to go on or
    // somebody waits.
    void hold(bool held);

    // Whether this process is a forked child, which has none of its parent's threads: nothing here may
    // be called then, not even the destructor.
    bool is_elsewhere() const;

private:
    void run();
    void add(LandingErrand* errand, std::list<LandingErrand*>& line);
    bool is_held() const { return held_ && !waiting_; }
    // Whether the thread can go on. It is not woken otherwise: that would take a core from whoever computes.
    bool has_work() const { return !first_.empty() || (!line_.empty() && !is_held()); }
    void look() { is_hurried_ = !first_.empty() || is_held(); }

    std::mutex mutex_;
    std::condition_variable begun_, done_;
    std::list<LandingErrand*> line_, first_;
    bool is_open_ = false;
    bool held_ = false;
    int waiting_ = 0;
    // What a landing looks at between its batches, without the mutex: whether it is to give way.
    std::atomic<bool> is_hurried_{false};
    bool ended_ = false;
    const uint32_t depth_;
    const int process_;
    std::thread thread_;
};

}  // namespace hillinfer
