// SPDX-License-Identifier: Apache-2.0
// Manual bursts over plain memory, with the interface of the vendor's hls::burst_maxi.
//
// The open ap_int headers lack it. Only what the kernels use is here: reading. As in the vendor's,
// an object is one pointer that is passed by value, and what is under way belongs to the port.
// Misuse that would hang, stall or corrupt hardware is printed; the caller takes text for a fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iostream>
#include <map>

namespace hls_bursts {

constexpr size_t LONGEST = 64;  // beats of 64 bytes: 4 KiB
constexpr size_t MOST_UNDER_WAY = 16;

struct Burst {
    size_t offset;
    size_t beats;
};

struct Port {
    uint64_t beats = 0;  // of the buffer behind it
    std::deque<Burst> under_way;
};

inline std::map<const void *, Port> &ports() {
    static std::map<const void *, Port> all;
    return all;
}

inline void complain(const char *what, size_t offset, size_t beats) {
    std::cout << "burst of " << beats << " beats at " << offset << ": " << what << std::endl;
}

}  // namespace hls_bursts

// For the caller of the library: before a launch, how long the buffer behind a port is, and after
// it, whether all that was requested has been read.
extern "C" void open_port(const void *buffer, uint64_t beats) {
    hls_bursts::ports()[buffer].beats = beats;
}

extern "C" void close_port(const void *buffer) {
    for (const hls_bursts::Burst &burst : hls_bursts::ports()[buffer].under_way) {
        hls_bursts::complain("never read to its end", burst.offset, burst.beats);
    }
    hls_bursts::ports().erase(buffer);
}

namespace hls {

template <typename T>
class burst_maxi {
  public:
    burst_maxi(T *buffer) : buffer_(buffer) {}

    // `offset` and `beats` count elements of the port.
    void read_request(size_t offset, unsigned beats) {
        static_assert(sizeof(T) == 64, "the limits are those of a port of 512 bits");
        hls_bursts::Port &port = hls_bursts::ports()[buffer_];
        if (beats == 0 || beats > hls_bursts::LONGEST) {
            hls_bursts::complain("not between 1 and 64 beats", offset, beats);
        } else if (offset / hls_bursts::LONGEST != (offset + beats - 1) / hls_bursts::LONGEST) {
            hls_bursts::complain("crosses 4 KiB", offset, beats);
        }
        if (port.under_way.size() == hls_bursts::MOST_UNDER_WAY) {
            hls_bursts::complain("16 others are under way", offset, beats);
        }
        if (offset + beats > port.beats) {
            hls_bursts::complain("leaves the buffer", offset, beats);
            return;
        }
        if (beats != 0) port.under_way.push_back({offset, beats});
    }

    T read() {
        hls_bursts::Port &port = hls_bursts::ports()[buffer_];
        if (port.under_way.empty()) {
            std::cout << "a beat was read that no burst was requested for" << std::endl;
            return T(0);
        }
        hls_bursts::Burst &oldest = port.under_way.front();
        const T beat = buffer_[oldest.offset];
        ++oldest.offset;
        if (--oldest.beats == 0) port.under_way.pop_front();
        return beat;
    }

  private:
    T *buffer_;
};

}  // namespace hls
