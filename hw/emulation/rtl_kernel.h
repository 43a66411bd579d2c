// SPDX-License-Identifier: Apache-2.0
// A Verilated kernel: registers by AXI-Lite, memory by the bench's memory model over the card's DRAM.
#pragma once

#include <memory>
#include <string>

#include "device_memory.h"
#include "kernel.h"

std::unique_ptr<Kernel> make_rtl_kernel(const std::string& library, DeviceMemory& memory);
