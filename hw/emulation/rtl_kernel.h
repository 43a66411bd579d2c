// SPDX-License-Identifier: Apache-2.0
// A Verilated kernel: registers by AXI-Lite, memory by the bench's memory model over the card's DRAM.
#pragma once

#include <memory>
#include <string>

#include "device_memory.h"
#include "kernel.h"

// What the card's memory takes, in cycles; zeros are an ideal one. The harness has the same words.
struct MemoryTiming {
    uint32_t read_min = 0, read_max = 0, write_min = 0, write_max = 0;
    uint32_t shared_bus = 0, refresh_period = 0, refresh_cycles = 0;
};

std::unique_ptr<Kernel> make_rtl_kernel(
    const std::string& library, const MemoryTiming& timing, DeviceMemory& memory);
