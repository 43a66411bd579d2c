// SPDX-License-Identifier: Apache-2.0
// Keys of prefixes: a chain of SHA-256 over a prompt's groups, by the system's libcrypto.
#pragma once
#include <cstdint>

namespace hillinfer {

constexpr int64_t kKeyBytes = 32;

// Hashes the key before each group and the group's bytes, one group behind the other.
// Returns 1; below 0 where the library is not there or refused.
int32_t prefix_keys(const uint8_t* before, const uint8_t* groups, int64_t group_bytes,
                    int64_t count, uint8_t* keys);

}  // namespace hillinfer
