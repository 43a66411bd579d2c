// SPDX-License-Identifier: Apache-2.0
// What a thread lands, as who is to look at it sees it.
#pragma once
#include <cstdint>

namespace hillinfer {

class Lander;
struct LandingErrand;

// Shared with Python: the order and types of these fields are part of the C interface.
struct Awaited {
    Lander* lander;
    const LandingErrand* errand;
    // Written by `arrive`: how long it waited, whether the errand is over, and whether all of it came as
    // it was written.
    int64_t nanoseconds;
    int32_t is_over;
    int32_t is_whole;
};

// Waits for an errand; false where not all of it came as it was written, so that nobody may look at it.
bool arrive(Awaited& coming);

}  // namespace hillinfer
