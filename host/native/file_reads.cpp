// SPDX-License-Identifier: Apache-2.0
#include "file_reads.h"

#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <new>

#include "api.h"
#include "ring.h"

namespace hillinfer {
namespace {

// These threads do nothing but wait in the kernel.
constexpr size_t kStackBytes = 128 << 10;
// Most reads of one call.
constexpr int64_t kMostParts = 64;

struct Batch {
    Batch(const FileReads& given, const ReadWay& way, Arrivals* told)
        : reads(given), descriptor(way.descriptor), joined_bytes(way.joined_bytes), arrivals(told) {}

    const FileReads& reads;
    const int descriptor;
    const int64_t joined_bytes;
    Arrivals* const arrivals;
    std::atomic<int64_t> next{0};
    // Under the pool's mutex.
    Batch* after = nullptr;
    int helpers_wanted = 0;
    int helping = 0;
    std::condition_variable done;
};

// Returns the end of a run of reads that one call makes.
int64_t run_end(const Batch& batch, int64_t first) {
    const FileReads& reads = batch.reads;
    int64_t stop = first + 1, bytes = reads.byte_counts[first];
    while (stop < reads.count && stop < first + kMostParts &&
           reads.file_offsets[stop] == reads.file_offsets[first] + bytes &&
           bytes + reads.byte_counts[stop] <= batch.joined_bytes) {
        bytes += reads.byte_counts[stop++];
    }
    return stop;
}

void read_run(const Batch& batch, int64_t first, int64_t stop) {
    const FileReads& reads = batch.reads;
    iovec parts[kMostParts];
    for (int64_t i = first; i < stop; ++i) {
        parts[i - first] = {reinterpret_cast<void*>(reads.addresses[i]),
                            size_t(reads.byte_counts[i])};
    }
    const ssize_t came =
        preadv(batch.descriptor, parts, int(stop - first), reads.file_offsets[first]);
    const int64_t error = came < 0 ? -errno : 0;
    int64_t left = came;
    for (int64_t i = first; i < stop; ++i) {
        const int64_t own = std::min(left, reads.byte_counts[i]);
        reads.results[i] = error ? error : own;
        left -= own;
        if (batch.arrivals && own == reads.byte_counts[i]) {
            batch.arrivals->came(i);
        }
    }
}

void take_reads(Batch& batch) {
    int64_t first = batch.next.load(std::memory_order_relaxed);
    while (first < batch.reads.count) {
        const int64_t stop = run_end(batch, first);
        if (batch.next.compare_exchange_weak(first, stop, std::memory_order_relaxed)) {
            read_run(batch, first, stop);
            first = batch.next.load(std::memory_order_relaxed);
        }
    }
}

// Not the scorer's pool: its threads are as many as there are cores, and these would hold them up.
class Readers {
public:
    void run(Batch& batch, int helpers) {
        std::unique_lock<std::mutex> lock(mutex_);
        grow(helpers);
        helpers = std::min(helpers, readers_);
        if (helpers) {
            batch.helpers_wanted = helpers;
            *last() = &batch;
        }
        lock.unlock();
        for (int i = 0; i < helpers; ++i) {
            start_.notify_one();
        }
        if (helpers && batch.arrivals) {
            batch.arrivals->meanwhile();
        }
        take_reads(batch);
        lock.lock();
        // Whoever has not come by now finds nothing to do.
        leave(batch);
        batch.done.wait(lock, [&] { return batch.helping == 0; });
    }

private:
    Batch** last() {
        Batch** place = &first_;
        while (*place) {
            place = &(*place)->after;
        }
        return place;
    }

    void leave(Batch& batch) {
        for (Batch** place = &first_; *place; place = &(*place)->after) {
            if (*place == &batch) {
                *place = batch.after;
                return;
            }
        }
    }

    void grow(int helpers) {
        if (readers_ >= helpers) {
            return;
        }
        // A signal is for a thread that somebody interrupts, never for these.
        sigset_t all, before;
        sigfillset(&all);
        pthread_attr_t attributes;
        if (pthread_attr_init(&attributes)) {
            return;
        }
        pthread_attr_setstacksize(&attributes, kStackBytes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        // Where the system gives no more of them, fewer reads are in flight.
        pthread_t thread;
        while (readers_ < helpers && !pthread_create(&thread, &attributes, enter, this)) {
            ++readers_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_attr_destroy(&attributes);
    }

    static void* enter(void* self) {
        static_cast<Readers*>(self)->help();
        return nullptr;
    }

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            start_.wait(lock, [&] { return first_ != nullptr; });
            Batch& batch = *first_;
            if (--batch.helpers_wanted == 0) {
                first_ = batch.after;
            }
            ++batch.helping;
            lock.unlock();
            take_reads(batch);
            lock.lock();
            if (--batch.helping == 0) {
                batch.done.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable start_;
    // Those that want more helpers, in the order they came.
    Batch* first_ = nullptr;
    int readers_ = 0;
};

// Never destroyed: its threads may still wait while the process ends.
Readers* readers = nullptr;
std::once_flag once;

void make_readers() { readers = new (std::nothrow) Readers; }

void read_by_threads(Batch& batch, int threads) {
    const int helpers = int(std::min<int64_t>(threads, batch.reads.count)) - 1;
    if (helpers < 1) {
        take_reads(batch);
        return;
    }
    std::call_once(once, [] {
        make_readers();
        // A forked child has none of its parent's threads.
        pthread_atfork(nullptr, nullptr, make_readers);
    });
    if (readers) {
        readers->run(batch, helpers);
    } else {
        take_reads(batch);
    }
}

}  // namespace

bool read_file(const ReadWay& way, const FileReads& reads, Arrivals* arrivals) {
    if (way.ring) {
        return way.ring->read(way, reads, arrivals);
    }
    Batch batch(reads, way, way.watch ? nullptr : arrivals);
    read_by_threads(batch, way.threads);
    if (way.watch) {
        for (int64_t i = 0; i < reads.count; ++i) {
            settle(way, reads, arrivals, i);
        }
    }
    return true;
}

void settle(const ReadWay& way, const FileReads& reads, Arrivals* arrivals, int64_t read) {
    if (way.watch) {
        reads.results[read] = way.watch->done(way.descriptor, reads.addresses[read],
                                              reads.byte_counts[read], reads.file_offsets[read],
                                              reads.results[read]);
    }
    if (arrivals && reads.results[read] == reads.byte_counts[read]) {
        arrivals->came(read);
    }
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_read_file(const hillinfer::ReadWay* way,
                                          const hillinfer::FileReads* reads) {
    return hillinfer::read_file(*way, *reads) ? hillinfer::kDone : hillinfer::kLost;
}
