// SPDX-License-Identifier: Apache-2.0
// The vendor's streams, for processes that run one after another, with an end for starved ones.
//
// A process polls until its input is there (`read_nb`). Where the process before it left too little
// that would go on for ever: everything that can come has come. So a poll in vain too many is
// printed, which the caller takes for a fault, and ends the process.
#pragma once

// Before the macro below, which must not reach into them.
#include <cxxabi.h>
#include <stdlib.h>

#include <deque>
#include <iostream>
#include <queue>
#include <sstream>
#include <string>
#include <typeinfo>

#define stream vendor_stream
#include_next <hls_stream.h>
#undef stream

namespace hls_sequential {

struct Starved {};

// A process polls in vain for a few rounds at most, while it works on what it has.
constexpr long MOST_VAIN_POLLS = 100000;

inline long &vain_polls() {
    thread_local long polls = 0;
    return polls;
}

template <typename Work>
void run(Work work) {
    vain_polls() = 0;
    try {
        work();
    } catch (const Starved &) {
    }
}

}  // namespace hls_sequential

namespace hls {

template <typename T>
class stream : public vendor_stream<T> {
  public:
    explicit stream(const char *name) : vendor_stream<T>(name) {}

    bool read_nb(T &value) {
        const bool here = vendor_stream<T>::read_nb(value);
        long &polls = hls_sequential::vain_polls();
        polls = here ? 0 : polls + 1;
        if (polls == hls_sequential::MOST_VAIN_POLLS) {
            std::cout << "stream " << this->_name << " is read while empty, for ever" << std::endl;
            throw hls_sequential::Starved();
        }
        return here;
    }
};

}  // namespace hls

#define PROCESS(...) hls_sequential::run([&] { __VA_ARGS__; })
