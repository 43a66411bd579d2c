// SPDX-License-Identifier: Apache-2.0
// Many reads of one file at once: in a ring of io_uring, or one blocking call in each of many threads.
#pragma once
#include <cstdint>

namespace hillinfer {

class Ring;

// What a drive may be looked at with, read by read, and made to fail. Shared with Python: the order
// and types of these fields, and of those below, are part of the C interface.
struct Watch {
    // In the place of io_uring_enter: reads that were taken, or an error number below 0.
    int32_t (*enter)(int32_t ring, uint32_t submit, uint32_t complete);
    // Told what the kernel said of a read; returns the bytes it brought, or an error number below 0.
    int64_t (*done)(int32_t descriptor, uint64_t address, int64_t byte_count, int64_t file_offset,
                    int64_t result);
};

struct ReadWay {
    Ring* ring;          // Of the calling thread; threads read where it is null.
    const Watch* watch;  // Null where nobody looks; its functions are called by the caller's thread.
    int32_t descriptor;
    int32_t threads;
    // Reads that follow each other in the file and in the list are one call of a thread up to so many
    // bytes, wherever each goes; 0 for a call of each.
    int64_t joined_bytes;
};

// Where the bytes of each read lie, where they go and how many they are; `results` gets what the
// kernel said: bytes that came, or an error number below 0.
struct FileReads {
    int64_t count;
    const int64_t* file_offsets;
    const uint64_t* addresses;
    const int64_t* byte_counts;
    int64_t* results;
};

// Learns of each read that brought all its bytes, from any thread, while others are under way: so
// nothing may be thrown at them, whose memory would go while it is written to.
class Arrivals {
public:
    // Where a read brings its bytes; `worker` is the number of the thread that makes it, among those
    // of these reads. Not asked by a ring, nor where somebody watches.
    virtual uint64_t address(const FileReads& reads, int64_t read, int64_t worker) {
        (void)worker;
        return reads.addresses[read];
    }
    virtual void came(int64_t read) noexcept = 0;
    // Whether the caller's thread has something to do while reads are under way, and does it.
    virtual bool has_work() const { return false; }
    virtual void meanwhile() noexcept {}

protected:
    ~Arrivals() = default;
};

// Makes every read once, many in flight, and returns when none is under way; false where a ring gave
// reads not back, whose memory nobody may have again. Calls of threads at the same time share those
// that read, which are kept.
bool read_file(const ReadWay& way, const FileReads& reads, Arrivals* arrivals = nullptr);

// Shows a read that is done, with its result, to whoever watches, and tells whoever waits for it.
void settle(const ReadWay& way, const FileReads& reads, Arrivals* arrivals, int64_t read);

}  // namespace hillinfer
