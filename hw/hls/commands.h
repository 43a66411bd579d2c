// SPDX-License-Identifier: Apache-2.0
// What `fetch` tells the other processes about each segment.
//
// Every process loops over all segments itself and stops at a command whose `end` is set, so that
// nothing drains between two segments. Segments without tokens are told to the writer only.
#pragma once

#include "shape.h"

namespace hillinfer {

enum LaunchError { ERROR_NONE = 0, ERROR_DESCRIPTOR = 1, ERROR_BUS = 2, ERROR_RESERVED = 3 };

struct ReadCommand {
    bool end;
    uint64_t source;  // beats from the start of the buffer
    uint32_t tokens;
    uint32_t stride;  // beats from row to row
};

struct WorkCommand {
    bool end;
    uint32_t tokens;
    ap_uint<16> position;  // low bits of the first token's
};

struct WriteCommand {
    bool end;
    ap_uint<2> error;  // with `end`: the launch ends at a wrong descriptor
    uint64_t target;
    uint32_t tokens;
    uint32_t stride;  // beats from one KV head's score array to the next
};

}  // namespace hillinfer
