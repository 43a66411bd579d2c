// SPDX-License-Identifier: Apache-2.0
// A ring of io_uring: many reads in flight from one thread.
#pragma once
#include <cstddef>
#include <cstdint>

#include "file_reads.h"

namespace hillinfer {

// The thread that opened it reads; any may close it while nothing is read.
class Ring {
public:
    // Makes a ring of `depth` reads, a power of two. Returns null and an error number where the kernel
    // has no io_uring, an old one (before Linux 6.1), or forbids it.
    static Ring* open(uint32_t depth, int* error);
    ~Ring();

    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // As `read_file`. What the kernel does not take is told as cancelled.
    bool read(const ReadWay& way, const FileReads& reads, Arrivals* arrivals);

private:
    struct Submission;
    struct Completion;

    Ring() = default;
    int map(const uint32_t* parameters);
    uint32_t queued() const;
    uint32_t in_flight() const;
    void push(const ReadWay& way, const FileReads& reads, int64_t first, uint32_t count);
    int enter(const ReadWay& way, uint32_t complete);
    void reap(const ReadWay& way, const FileReads& reads, Arrivals* arrivals);
    bool drain(const ReadWay& way, const FileReads& reads, Arrivals* arrivals);

    int descriptor_ = -1;
    uint32_t depth_ = 0;
    bool lost_ = false;
    void* queues_ = nullptr;
    size_t queues_bytes_ = 0;
    Submission* slots_ = nullptr;
    size_t slots_bytes_ = 0;
    Completion* completions_ = nullptr;
    uint32_t slot_mask_ = 0, completion_mask_ = 0;
    // Written by the kernel: heads of what it took, tails of what it is done with.
    uint32_t *taken_ = nullptr, *pushed_ = nullptr, *reaped_ = nullptr, *done_ = nullptr;
};

}  // namespace hillinfer
