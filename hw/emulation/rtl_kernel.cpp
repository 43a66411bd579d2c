// SPDX-License-Identifier: Apache-2.0
#include "rtl_kernel.h"

#include "../testbench/harness.h"
#include "shared_library.h"

namespace {

// Cycles between two looks at the driver's socket: a hundredth of a second of a small kernel.
constexpr uint64_t STRIDE = 500;
constexpr uint32_t CONTROL = 0x00, START = 1, IDLE = 4, READY = 8;

class RtlKernel : public Kernel {
public:
    RtlKernel(const std::string& path, const MemoryTiming& timing, DeviceMemory& memory)
        : library_(path),
          read_(library_.find<uint32_t(void*, uint32_t)>("session_read")),
          write_(library_.find<void(void*, uint32_t, uint32_t)>("session_write")),
          cycles_(library_.find<void(void*, uint64_t)>("session_cycles")),
          now_(library_.find<uint64_t(void*)>("session_now")),
          free_(library_.find<void(void*)>("session_free")) {
        buffer_ = {0, memory.at(0, memory.size()), memory.size(), 1};
        launch_.buffers = &buffer_;
        launch_.buffer_count = 1;
        Memory& own = launch_.memory;
        own.read_min = timing.read_min;
        own.read_max = timing.read_max;
        own.write_min = timing.write_min;
        own.write_max = timing.write_max;
        own.shared_bus = timing.shared_bus;
        own.refresh_period = timing.refresh_period;
        own.refresh_cycles = timing.refresh_cycles;
        own.outstanding = 16;
        launch_.memory.commit_at_response = 1;
        launch_.memory.seed = 1;
        for (int64_t& beat : launch_.memory.read_error) beat = -1;
        launch_.memory.write_error = -1;
        session_ = library_.find<void*()>("session_new")();
        library_.find<void(void*, const Launch*)>("session_attach")(session_, &launch_);
    }
    ~RtlKernel() override { free_(session_); }

    uint32_t read(uint32_t offset) override {
        uint32_t value = read_(session_, offset);
        if (offset != CONTROL) return value;
        // ap_ready is cleared by reading it: what `advance` read is given here.
        value |= ready_;
        ready_ = 0;
        return value;
    }
    void write(uint32_t offset, uint32_t value) override {
        write_(session_, offset, value);
        if (offset == CONTROL && (value & START)) running_ = true;
    }
    bool advance() override {
        if (!running_) return false;
        uint64_t before = now_(session_);
        cycles_(session_, STRIDE);
        worked_ += now_(session_) - before;
        uint32_t control = read_(session_, CONTROL);
        ready_ |= control & READY;
        running_ = !(control & IDLE);
        return running_;
    }
    uint64_t cycles() const override { return worked_; }

private:
    SharedLibrary library_;
    uint32_t (*read_)(void*, uint32_t);
    void (*write_)(void*, uint32_t, uint32_t);
    void (*cycles_)(void*, uint64_t);
    uint64_t (*now_)(void*);
    void (*free_)(void*);
    Buffer buffer_{};
    Launch launch_{};
    void* session_;
    bool running_ = false;
    uint32_t ready_ = 0;
    uint64_t worked_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_rtl_kernel(
    const std::string& library, const MemoryTiming& timing, DeviceMemory& memory) {
    return std::make_unique<RtlKernel>(library, timing, memory);
}
