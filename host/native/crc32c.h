// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli, as of iSCSI and ext4), by the processor's own instruction where it has one.
#pragma once
#include <cstdint>

namespace hillinfer {

// The checksum of some bytes that go on behind others whose checksum is `before`; 0 where they are
// the first.
uint32_t crc32c(uint32_t before, const uint8_t* data, int64_t size);

}  // namespace hillinfer
