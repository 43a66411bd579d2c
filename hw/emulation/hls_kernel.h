// SPDX-License-Identifier: Apache-2.0
// The compiled HLS C++ of a kernel behind the register map that Vitis HLS would give it. A launch
// runs in a thread of its own, all at once.
#pragma once

#include <memory>
#include <string>

#include "device_memory.h"
#include "kernel.h"

std::unique_ptr<Kernel> make_hls_kernel(
    const std::string& library, const std::string& name, int pointers, int scalars,
    DeviceMemory& memory);
