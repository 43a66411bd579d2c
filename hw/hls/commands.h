// SPDX-License-Identifier: Apache-2.0
// What `fetch` tells the other processes about each segment.
//
// A process between `fetch` and the writer is one flat, pipelined loop, and each round takes one
// beat or looks for one command: an inner loop per segment would fill and drain its pipeline every
// time. No round waits for what it reads (`read_nb`): where it is not there the round does nothing.
// A pipeline that stalls for its next input would keep back results on which that input can depend;
// rounds with nothing to do push them out. So the plain stalling pipeline (style=stp) serves, which
// stalls only for room to write. A free-running one (style=frp) is refused with `read_nb` (AMD's
// message HLS 200-1964). What a round reads from two streams waits in registers, one word of each.
// `fetch` counts the rounds of each process beforehand, so that no product lies on the path of
// their counters. Segments without tokens are told to the writer only. A command whose `end` is set
// ends a process.
#pragma once

#include "shape.h"

namespace hillinfer {

enum LaunchError { ERROR_NONE = 0, ERROR_DESCRIPTOR = 1, ERROR_BUS = 2, ERROR_RESERVED = 3 };

// The scope argument: its low byte is 0 for `layer` and 1 for `kv_head`, and above it stands how
// many queries come beside the first. Where it is anything else no segment passes the checks.
inline bool is_per_kv_head(uint32_t scope) {
#pragma HLS INLINE
    return (scope & 1) == 1;
}

inline uint32_t further_queries(uint32_t scope) {
#pragma HLS INLINE
    return scope >> 8;
}

// Score arrays of a segment, of one query and of all.
inline uint32_t set_arrays(uint32_t scope) {
#pragma HLS INLINE
    return is_per_kv_head(scope) ? KV_HEADS : 1;
}

inline uint32_t score_arrays(uint32_t scope) {
#pragma HLS INLINE
    return set_arrays(scope) * (1 + further_queries(scope));
}

// One or more runs of beats that lie one behind the other.
struct ReadCommand {
    bool end;
    uint64_t first;  // beats from the start of the buffer; of the first run
    uint64_t last;   // inclusive
    uint32_t runs;
    uint32_t stride;  // beats from run to run
};

struct WorkCommand {
    bool end;
    uint32_t rounds;  // of the process that gets it; 0 with `end`
    uint32_t tokens;
    ap_uint<16> position;  // low bits of the first token's
};

struct WriteCommand {
    bool end;
    ap_uint<2> error;  // with `end`: the launch ends at a wrong descriptor
    uint64_t target;
    uint32_t tokens;
    uint32_t stride;  // beats from one score array to the next
};

}  // namespace hillinfer
