// SPDX-License-Identifier: Apache-2.0
#include "hls_kernel.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "shared_library.h"

namespace {

constexpr uint32_t CONTROL = 0x00, FIRST_ARGUMENT = 0x10;
constexpr uint32_t START = 1, DONE = 2, IDLE = 4, READY = 8, CONTINUE = 16;
// The buffer of keys, which is read in manual bursts, among the pointers; bytes of a beat.
constexpr int KEYS = 1;
constexpr uint64_t BEAT = 64;
constexpr uint32_t POINTER_STRIDE = 12, SCALAR_STRIDE = 8;

using P = void*;
using S = uint32_t;

class HlsKernel : public Kernel {
public:
    HlsKernel(const std::string& path, const std::string& name, int pointers, int scalars,
              DeviceMemory& memory)
        : library_(path), entry_(library_.find<void()>(name)),
          open_port_(library_.find<void(const void*, uint64_t)>("open_port")),
          close_port_(library_.find<void(const void*)>("close_port")), pointers_(pointers),
          scalars_(scalars), memory_(memory) {
        bool known = (pointers == 5 && (scalars == 2 || scalars == 3))
            || (pointers == 6 && scalars == 3);
        if (!known)
            throw std::runtime_error(name + ": no kernel has " + std::to_string(pointers)
                + " pointers and " + std::to_string(scalars) + " numbers");
        registers_.resize(FIRST_ARGUMENT / 4 + 3 * pointers + 2 * scalars + 1);
    }
    ~HlsKernel() override { join(); }

    uint32_t read(uint32_t offset) override {
        if (offset != CONTROL) return offset / 4 < registers_.size() ? registers_[offset / 4] : 0;
        if (running_ && ended_) {
            join();
            running_ = false;
            done_ = true;
            ready_ = READY;
        }
        uint32_t value = (running_ ? START : 0) | (done_ ? DONE : 0) | ready_
            | (!running_ && !done_ ? IDLE : 0);
        ready_ = 0;
        return value;
    }
    void write(uint32_t offset, uint32_t value) override {
        if (offset != CONTROL) {
            if (offset / 4 < registers_.size()) registers_[offset / 4] = value;
            return;
        }
        if (value & CONTINUE) done_ = false;
        if ((value & START) && !running_) start();
    }
    bool advance() override { return false; }  // its thread goes on by itself
    uint64_t cycles() const override { return 0; }

private:
    void start() {
        std::vector<P> p;
        std::vector<S> s;
        for (int i = 0; i < pointers_; i++) {
            const uint32_t* word = &registers_[(FIRST_ARGUMENT + POINTER_STRIDE * i) / 4];
            // The kernel's own bounds are its descriptors'; the window ends what lies behind.
            p.push_back(memory_.at(word[0] | (uint64_t)word[1] << 32, 0));
        }
        for (int i = 0; i < scalars_; i++)
            s.push_back(registers_[(FIRST_ARGUMENT + POINTER_STRIDE * pointers_
                                    + SCALAR_STRIDE * i) / 4]);
        const uint32_t* keys = &registers_[(FIRST_ARGUMENT + POINTER_STRIDE * KEYS) / 4];
        uint64_t beats = (memory_.size() - (keys[0] | (uint64_t)keys[1] << 32)) / BEAT;
        running_ = true;
        ended_ = false;
        thread_ = std::thread([this, p, s, beats] {
            open_port_(p[KEYS], beats);
            void* f = (void*)entry_;
            if (pointers_ == 5 && scalars_ == 2)
                ((void (*)(P, P, P, P, P, S, S))f)(p[0], p[1], p[2], p[3], p[4], s[0], s[1]);
            else if (pointers_ == 5)
                ((void (*)(P, P, P, P, P, S, S, S))f)(
                    p[0], p[1], p[2], p[3], p[4], s[0], s[1], s[2]);
            else
                ((void (*)(P, P, P, P, P, P, S, S, S))f)(
                    p[0], p[1], p[2], p[3], p[4], p[5], s[0], s[1], s[2]);
            close_port_(p[KEYS]);
            ended_ = true;
        });
    }
    void join() {
        if (thread_.joinable()) thread_.join();
    }

    SharedLibrary library_;
    void (*entry_)();
    void (*open_port_)(const void*, uint64_t);
    void (*close_port_)(const void*);
    int pointers_, scalars_;
    DeviceMemory& memory_;
    std::vector<uint32_t> registers_;
    std::thread thread_;
    std::atomic<bool> ended_{false};
    bool running_ = false, done_ = false;
    uint32_t ready_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_hls_kernel(
    const std::string& library, const std::string& name, int pointers, int scalars,
    DeviceMemory& memory) {
    return std::make_unique<HlsKernel>(library, name, pointers, scalars, memory);
}
