// SPDX-License-Identifier: Apache-2.0
// A thread that scores one launch after the other while its caller does something else.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace hillinfer {

// Nothing that it runs asks for Python's global lock, which a thread of Python's would wait for
// twice per launch.
class LaunchThread {
public:
    LaunchThread();

    // Ends what is under way first.
    ~LaunchThread();

    // Waits for the job before, and has this one done; it returns what `wait` is to return.
    void begin(std::function<int32_t()> job);

    // Returns, once no job is under way, what the last one returned.
    int32_t wait();

    // Whether this process is a forked child, which has none of its parent's threads: nothing here may
    // be called then, not even the destructor.
    bool is_elsewhere() const;

private:
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<int32_t()> job_;
    int32_t outcome_ = 0;
    bool busy_ = false;
    bool ended_ = false;
    const int process_;
    std::thread thread_;
};

}  // namespace hillinfer
