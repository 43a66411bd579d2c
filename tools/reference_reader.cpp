// SPDX-License-Identifier: Apache-2.0
// Reads random places of a file for some seconds, past the page cache, with many reads in flight at
// every moment: what a drive can give. tools/drive_bench.py compiles it and compares with it.
//
//   reference_reader WAY FILE FILE_BYTES READ_BYTES DEPTH SECONDS SEED
//
// WAY is `ring` (io_uring, one thread that hands over a read for each that came back) or `threads`
// (DEPTH threads, a read each). Prints one line of JSON: bytes, seconds and processor seconds. Ends
// with 3 where the kernel gives no ring.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int no_ring = 3;
constexpr std::size_t page_bytes = 4096;

using Clock = std::chrono::steady_clock;

struct Job {
    int file;
    std::uint64_t places;
    std::uint32_t read_bytes;
    unsigned depth;
    double seconds;
    std::uint64_t seed;
};

[[noreturn]] void fail(const std::string& what, int error, int code = 1) {
    // Several threads may come to the same end; one tells it.
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    while (told.test_and_set()) std::this_thread::sleep_for(std::chrono::seconds(1));
    std::fprintf(stderr, "%s: %s\n", what.c_str(), std::strerror(error));
    std::exit(code);
}

double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// The next place to read, in bytes: xorshift, whose state is of one thread.
std::uint64_t next_offset(std::uint64_t& state, const Job& job) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % job.places * job.read_bytes;
}

char* aligned(std::size_t bytes) {
    void* memory = nullptr;
    const std::size_t huge = 2u << 20;
    if (int error = posix_memalign(&memory, bytes < huge ? page_bytes : huge, bytes)) fail("memory", error);
    // As HillInfer's own buffers; where a kernel has none, it is memory all the same.
    if (bytes >= huge) madvise(memory, bytes / huge * huge, MADV_HUGEPAGE);
    std::memset(memory, 0, bytes);
    return static_cast<char*>(memory);
}

void check(long count, const Job& job) {
    if (count < 0) fail("read", static_cast<int>(-count));
    if (count != static_cast<long>(job.read_bytes)) fail("read came short", EIO);
}

std::uint64_t by_threads(const Job& job) {
    std::atomic<std::uint64_t> reads{0};
    std::vector<std::thread> threads;
    const auto start = Clock::now();
    for (unsigned number = 0; number < job.depth; ++number) {
        threads.emplace_back([&, number] {
            char* buffer = aligned(job.read_bytes);
            std::uint64_t state = job.seed + 0x9E3779B97F4A7C15ull * (number + 1);
            std::uint64_t own = 0;
            while (since(start) < job.seconds) {
                const auto offset = static_cast<off_t>(next_offset(state, job));
                const long count = pread(job.file, buffer, job.read_bytes, offset);
                check(count < 0 ? -errno : count, job);
                ++own;
            }
            reads += own;
            std::free(buffer);
        });
    }
    for (auto& one : threads) one.join();
    return reads;
}

unsigned load(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

void store(unsigned* word, unsigned value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

std::uint64_t by_ring(const Job& job) {
    io_uring_params given{};
    const int ring = static_cast<int>(syscall(SYS_io_uring_setup, job.depth, &given));
    if (ring < 0) fail("io_uring", errno, no_ring);
    const auto mapped = [&](std::size_t bytes, std::uint64_t what) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                        static_cast<off_t>(what));
        if (at == MAP_FAILED) fail("io_uring", errno, no_ring);
        return static_cast<char*>(at);
    };
    char* sq = mapped(given.sq_off.array + given.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char* cq = mapped(given.cq_off.cqes + given.cq_entries * sizeof(io_uring_cqe),
                      IORING_OFF_CQ_RING);
    auto* entries = reinterpret_cast<io_uring_sqe*>(
        mapped(given.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    const auto word = [](char* base, unsigned offset) {
        return reinterpret_cast<unsigned*>(base + offset);
    };
    unsigned* sq_tail = word(sq, given.sq_off.tail);
    unsigned* sq_places = word(sq, given.sq_off.array);
    const unsigned sq_mask = *word(sq, given.sq_off.ring_mask);
    unsigned* cq_head = word(cq, given.cq_off.head);
    unsigned* cq_tail = word(cq, given.cq_off.tail);
    const unsigned cq_mask = *word(cq, given.cq_off.ring_mask);
    const auto* done = reinterpret_cast<io_uring_cqe*>(cq + given.cq_off.cqes);

    char* buffers = aligned(static_cast<std::size_t>(job.depth) * job.read_bytes);
    std::uint64_t state = job.seed | 1;
    unsigned waiting = 0;
    const auto push = [&](std::uint64_t slot) {
        const unsigned tail = *sq_tail;
        io_uring_sqe& entry = entries[tail & sq_mask];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = IORING_OP_READ;
        entry.fd = job.file;
        entry.off = next_offset(state, job);
        entry.addr = reinterpret_cast<std::uint64_t>(buffers + slot * job.read_bytes);
        entry.len = job.read_bytes;
        entry.user_data = slot;
        sq_places[tail & sq_mask] = tail & sq_mask;
        store(sq_tail, tail + 1);
        ++waiting;
    };
    for (unsigned slot = 0; slot < job.depth; ++slot) push(slot);
    std::uint64_t reads = 0;
    unsigned flying = job.depth;
    const auto start = Clock::now();
    while (flying > 0) {
        const long taken =
            syscall(SYS_io_uring_enter, ring, waiting, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            fail("io_uring", errno);
        }
        if (taken > 0) waiting -= static_cast<unsigned>(taken);
        const bool more = since(start) < job.seconds;
        unsigned head = *cq_head;
        for (const unsigned end = load(cq_tail); head != end; ++head) {
            const io_uring_cqe one = done[head & cq_mask];
            check(one.res, job);
            ++reads;
            if (more) {
                push(one.user_data);
            } else {
                --flying;
            }
        }
        store(cq_head, head);
    }
    std::free(buffers);
    close(ring);
    return reads;
}

double processor_seconds() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto seconds = [](const timeval& one) { return one.tv_sec + 1e-6 * one.tv_usec; };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
}

}  // namespace

int main(int count, char** given) {
    if (count != 8) {
        std::fprintf(stderr, "give WAY FILE FILE_BYTES READ_BYTES DEPTH SECONDS SEED\n");
        return 2;
    }
    const std::string way = given[1];
    Job job{};
    job.read_bytes = static_cast<std::uint32_t>(std::strtoul(given[4], nullptr, 10));
    job.depth = static_cast<unsigned>(std::strtoul(given[5], nullptr, 10));
    job.seconds = std::strtod(given[6], nullptr);
    job.seed = std::strtoull(given[7], nullptr, 10);
    const std::uint64_t file_bytes = std::strtoull(given[3], nullptr, 10);
    if (job.read_bytes == 0 || job.depth == 0 || file_bytes < job.read_bytes) {
        std::fprintf(stderr, "sizes and depth must be above 0, and a read no longer than the file\n");
        return 2;
    }
    job.places = file_bytes / job.read_bytes;
    job.file = open(given[2], O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (job.file < 0) fail(given[2], errno);
    const double used = processor_seconds();
    const auto start = Clock::now();
    const std::uint64_t reads = way == "ring" ? by_ring(job) : by_threads(job);
    const double seconds = since(start);
    std::printf("{\"bytes\": %llu, \"seconds\": %.6f, \"processor_seconds\": %.6f}\n",
                static_cast<unsigned long long>(reads * job.read_bytes), seconds,
                processor_seconds() - used);
    return 0;
}
