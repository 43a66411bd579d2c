// SPDX-License-Identifier: Apache-2.0
// A card's DRAM: one window of addresses, without pages where nothing was written. A peer-to-peer
// buffer is a file that the driver maps, too, so that both see the same bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>

class DeviceMemory {
public:
    explicit DeviceMemory(uint64_t bytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    uint64_t size() const { return size_; }
    // The bytes of an address; std::out_of_range where they do not lie in the window.
    uint8_t* at(uint64_t address, uint64_t bytes);
    // Puts a file of whole pages, which this makes, at an address; returns its path.
    std::string share(uint64_t address, uint64_t bytes, const std::string& folder);
    // Ends a buffer: a shared one's file is removed, its addresses are ordinary again.
    void release(uint64_t address);

private:
    struct Shared {
        std::string path;
        uint64_t bytes;
    };
    uint8_t* window_;
    uint64_t size_;
    unsigned made_ = 0;
    std::map<uint64_t, Shared> shared_;
};
