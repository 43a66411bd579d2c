// SPDX-License-Identifier: Apache-2.0
// The card: its memory and its kernels, and what XRT's driver may ask of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_memory.h"
#include "kernel.h"

class Device {
public:
    // Reads `device.conf`: a line per kernel, `rtl BASE LIBRARY` or
    // `hls BASE LIBRARY NAME POINTERS SCALARS`, and `memory BYTES` before them.
    explicit Device(const std::string& config);

    // Answers a call's payload; std::runtime_error for a call that no driver makes.
    std::string answer(uint32_t call, const std::string& payload);
    // Lets kernels go on; returns whether one of them has more to do.
    bool advance();
    bool closed() const { return closed_; }
    // What its kernels have done so far, as JSON: all of them together, and `kernels`, the launches
    // of each; cycles are 0 where the engine counts none.
    std::string summary() const;

private:
    struct Placed {
        uint64_t base;
        std::unique_ptr<Kernel> kernel;
        uint64_t launches = 0;
    };
    Placed& at(uint64_t address);
    std::string run_folder_;
    std::unique_ptr<DeviceMemory> memory_;
    std::vector<Placed> kernels_;
    bool closed_ = false;
};
