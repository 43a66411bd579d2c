// SPDX-License-Identifier: Apache-2.0
// Status beats (scoring contract, section 11).
#pragma once

#include "commands.h"

namespace hillinfer {

inline Beat status_beat(uint32_t launch_id, uint32_t tokens_complete, ap_uint<2> error) {
#pragma HLS INLINE
    Beat beat = 0;
    beat.range(63, 0) = SPEC_HASH;
    beat.range(95, 64) = launch_id;
    beat.range(127, 96) = tokens_complete;
    beat.range(159, 128) = error;
    return beat;
}

}  // namespace hillinfer
