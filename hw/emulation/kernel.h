// SPDX-License-Identifier: Apache-2.0
// One kernel on the card, as the bus of its registers sees it.
#pragma once

#include <cstdint>

class Kernel {
public:
    virtual ~Kernel() = default;
    virtual uint32_t read(uint32_t offset) = 0;
    virtual void write(uint32_t offset, uint32_t value) = 0;
    // Goes on for a while; returns whether there is more to do.
    virtual bool advance() = 0;
    // Cycles simulated so far; 0 where an engine has none.
    virtual uint64_t cycles() const = 0;
};
