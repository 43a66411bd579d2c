// SPDX-License-Identifier: Apache-2.0
#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "api.h"

namespace hillinfer {

// The kernel's own layouts: its headers may be older than the kernel that this runs on.
struct Ring::Submission {
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t descriptor;
    uint64_t file_offset;
    uint64_t address;
    uint32_t byte_count;
    uint32_t read_flags;
    uint64_t tag;
    uint64_t unused[3];
};

struct Ring::Completion {
    uint64_t tag;
    int32_t result;
    uint32_t flags;
};

namespace {

// The same numbers on every kind of processor.
constexpr long kSetup = 425, kEnter = 426;
constexpr uint32_t kGetEvents = 1;
constexpr uint8_t kRead = 22;
// One thread hands reads over, and completions are written while that thread waits for them and at no
// other time.
constexpr uint32_t kSingleIssuer = 1 << 12, kDeferTaskrun = 1 << 13;
constexpr uint32_t kSingleMap = 1 << 0;
constexpr off_t kSubmissionsAt = 0x10000000;
// Words of the parameters, where the kernel says what it made, and of its two lists of offsets.
constexpr int kWords = 30, kEntries = 0, kFlags = 2, kFeatures = 5, kSubmissionQueue = 10,
              kCompletionQueue = 20;
constexpr int kHead = 0, kTail = 1, kArray = 6, kCompletions = 5;

// How often, and how far apart, a ring is asked again for reads that it does not give back.
constexpr int kTries = 50;
constexpr useconds_t kPauseMicroseconds = 20000;
// So few under way are waited for together.
constexpr uint32_t kFew = 8;

uint32_t seen(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void show(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // namespace

Ring* Ring::open(uint32_t depth, int* error) {
    Ring* const made = new (std::nothrow) Ring;
    if (!made) {
        *error = ENOMEM;
        return nullptr;
    }
    uint32_t parameters[kWords] = {};
    parameters[kFlags] = kSingleIssuer | kDeferTaskrun;
    made->depth_ = depth;
    // The kernel lets no program that this one starts inherit it.
    made->descriptor_ = int(syscall(kSetup, depth, parameters));
    *error = made->descriptor_ < 0 ? errno : made->map(parameters);
    if (*error) {
        delete made;
        return nullptr;
    }
    return made;
}

Ring::~Ring() {
    if (queues_) {
        munmap(queues_, queues_bytes_);
    }
    if (slots_) {
        munmap(slots_, slots_bytes_);
    }
    if (descriptor_ >= 0) {
        close(descriptor_);
    }
}

int Ring::map(const uint32_t* parameters) {
    if (!(parameters[kFeatures] & kSingleMap)) {
        return ENOSYS;
    }
    const uint32_t entries = parameters[kEntries], completions = parameters[kEntries + 1];
    const uint32_t* const submission = parameters + kSubmissionQueue;
    const uint32_t* const completion = parameters + kCompletionQueue;
    queues_bytes_ = std::max(submission[kArray] + size_t(entries) * sizeof(uint32_t),
                             completion[kCompletions] + completions * sizeof(Completion));
    slots_bytes_ = entries * sizeof(Submission);
    constexpr int kAccess = PROT_READ | PROT_WRITE, kSharing = MAP_SHARED | MAP_POPULATE;
    void* const queues = mmap(nullptr, queues_bytes_, kAccess, kSharing, descriptor_, 0);
    if (queues == MAP_FAILED) {
        return errno;
    }
    queues_ = queues;
    void* const slots = mmap(nullptr, slots_bytes_, kAccess, kSharing, descriptor_, kSubmissionsAt);
    if (slots == MAP_FAILED) {
        return errno;
    }
    slots_ = static_cast<Submission*>(slots);
    uint8_t* const base = static_cast<uint8_t*>(queues_);
    const auto word = [&](uint32_t at) { return reinterpret_cast<uint32_t*>(base + at); };
    taken_ = word(submission[kHead]);
    pushed_ = word(submission[kTail]);
    reaped_ = word(completion[kHead]);
    done_ = word(completion[kTail]);
    completions_ = reinterpret_cast<Completion*>(base + completion[kCompletions]);
    slot_mask_ = entries - 1;
    completion_mask_ = completions - 1;
    // Slot i is always announced as slot i.
    for (uint32_t i = 0; i < entries; ++i) {
        word(submission[kArray])[i] = i;
    }
    return 0;
}

uint32_t Ring::queued() const { return *pushed_ - seen(taken_); }

uint32_t Ring::in_flight() const { return seen(taken_) - *reaped_; }

void Ring::push(const ReadWay& way, const FileReads& reads, int64_t first, uint32_t count) {
    const uint32_t tail = *pushed_;
    for (uint32_t i = 0; i < count; ++i) {
        const int64_t read = first + i;
        Submission slot{};
        slot.opcode = kRead;
        slot.descriptor = way.descriptor;
        slot.file_offset = uint64_t(reads.file_offsets[read]);
        slot.address = reads.addresses[read];
        slot.byte_count = uint32_t(reads.byte_counts[read]);
        slot.tag = uint64_t(read);
        slots_[(tail + i) & slot_mask_] = slot;
    }
    show(pushed_, tail + count);
}

// Hands over what is queued and waits until so many are done; returns an error number below 0 where
// the kernel takes nothing.
int Ring::enter(const ReadWay& way, uint32_t complete) {
    if (way.watch) {
        return way.watch->enter(descriptor_, queued(), complete);
    }
    const long taken =
        syscall(kEnter, descriptor_, queued(), complete, kGetEvents, nullptr, size_t(0));
    return taken < 0 ? -errno : int(taken);
}

void Ring::reap(const ReadWay& way, const FileReads& reads, Arrivals* arrivals) {
    for (uint32_t head = *reaped_, tail = seen(done_); head != tail; ++head) {
        const Completion done = completions_[head & completion_mask_];
        show(reaped_, head + 1);
        reads.results[done.tag] = done.result;
        settle(way, reads, arrivals, int64_t(done.tag));
    }
}

// Takes back what is queued and waits until nothing is under way any more.
bool Ring::drain(const ReadWay& way, const FileReads& reads, Arrivals* arrivals) {
    show(pushed_, seen(taken_));
    for (int tries = 0; in_flight();) {
        const int taken = enter(way, in_flight());
        if (taken < 0 && taken != -EINTR) {
            if (++tries == kTries) {
                lost_ = true;
                return false;
            }
            usleep(kPauseMicroseconds);
        }
        reap(way, reads, arrivals);
    }
    return true;
}

bool Ring::read(const ReadWay& way, const FileReads& reads, Arrivals* arrivals) {
    if (lost_) {
        return false;
    }
    std::fill(reads.results, reads.results + reads.count, -ECANCELED);
    int64_t pushed = 0;
    while (pushed < reads.count || queued() || in_flight()) {
        const uint32_t room = depth_ - in_flight() - queued();
        const uint32_t more = uint32_t(std::min<int64_t>(room, reads.count - pushed));
        push(way, reads, pushed, more);
        pushed += more;
        int taken = 0;
        if (more && arrivals && arrivals->has_work()) {
            taken = enter(way, 0);
            if (taken >= 0) {
                arrivals->meanwhile();
            }
        }
        // Half of them, so that the drive has the other half while new ones are made and rows copied.
        const uint32_t under_way = in_flight() + queued();
        if (taken >= 0) {
            taken = enter(way, under_way <= kFew ? under_way : under_way / 2);
        }
        if (taken < 0 && taken != -EINTR) {
            // Too much for the kernel now: it looks at what is queued in `enter` only.
            break;
        }
        reap(way, reads, arrivals);
        if (arrivals) {
            arrivals->meanwhile();
        }
    }
    return drain(way, reads, arrivals);
}

}  // namespace hillinfer

// Returns 0, or an error number below 0.
HILLINFER_API int32_t hillinfer_ring_open(uint32_t depth, void** ring) {
    int error = 0;
    *ring = hillinfer::Ring::open(depth, &error);
    return -error;
}

HILLINFER_API void hillinfer_ring_close(void* ring) { delete static_cast<hillinfer::Ring*>(ring); }
