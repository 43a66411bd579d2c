// SPDX-License-Identifier: Apache-2.0
// A port that keeps the order of what is written through it, in place of a pointer to beats.
//
// Memory after a launch does not tell in which order it was written, nor what was overwritten. So
// tests build a kernel whose written pointers are of this class: every beat goes to memory as
// before, and into one record for all ports. What a port holds cannot be read back.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "shape.h"

namespace hls_writes {

struct Write {
    uint64_t port;
    uint64_t beat;  // within the port's buffer
    unsigned char bytes[64];
};

inline std::vector<Write> &all() {
    static std::vector<Write> writes;
    return writes;
}

class Place {
  public:
    Place(uint64_t port, hillinfer::Beat *buffer, uint64_t beat)
        : port_(port), buffer_(buffer), beat_(beat) {}

    void operator=(const hillinfer::Beat &value) {
        Write write = {port_, beat_, {}};
        std::memcpy(write.bytes, &value, sizeof write.bytes);
        all().push_back(write);
        buffer_[beat_] = value;
    }

  private:
    uint64_t port_;
    hillinfer::Beat *buffer_;
    uint64_t beat_;
};

// As `hls::burst_maxi` it is one pointer and passed by value, so a caller passes a pointer.
template <uint64_t PORT>
class Port {
  public:
    Place operator[](uint64_t beat) const { return {PORT, buffer_, beat}; }

  private:
    hillinfer::Beat *buffer_;
};

}  // namespace hls_writes

typedef hls_writes::Port<0> RecordedOutput;
typedef hls_writes::Port<1> RecordedStatus;
static_assert(sizeof(RecordedOutput) == sizeof(void *), "passed as a pointer");

// For the caller of the library.
extern "C" uint64_t count_writes() { return hls_writes::all().size(); }

// Moves the record into memory for that many writes.
extern "C" void take_writes(hls_writes::Write *writes) {
    std::memcpy(writes, hls_writes::all().data(), hls_writes::all().size() * sizeof *writes);
    hls_writes::all().clear();
}
