// SPDX-License-Identifier: Apache-2.0
#include "launch_thread.h"

#include <unistd.h>

#include <utility>

#include "exact_floats.h"

namespace hillinfer {

LaunchThread::LaunchThread() : process_(getpid()), thread_([this] { run(); }) {}

bool LaunchThread::is_elsewhere() const { return getpid() != process_; }

LaunchThread::~LaunchThread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void LaunchThread::begin(std::function<int32_t()> job) {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !busy_; });
        job_ = std::move(job);
        busy_ = true;
    }
    changed_.notify_all();
}

int32_t LaunchThread::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
    return outcome_;
}

void LaunchThread::run() {
    const ExactFloats exact;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return busy_ || ended_; });
        if (!busy_) {
            return;
        }
        lock.unlock();
        const int32_t outcome = job_();
        lock.lock();
        outcome_ = outcome;
        busy_ = false;
        changed_.notify_all();
    }
}

}  // namespace hillinfer
