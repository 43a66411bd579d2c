// SPDX-License-Identifier: Apache-2.0
// Many reads of one file at once, one blocking call in each of many threads.
#pragma once
#include <cstdint>

namespace hillinfer {

// Where the bytes of each read lie, where they go and how many they are; `results` gets what the
// kernel said: bytes that came, or an error number below 0.
struct FileReads {
    int32_t descriptor;
    int64_t count;
    const int64_t* file_offsets;
    const uint64_t* addresses;
    const int64_t* byte_counts;
    int64_t* results;
};

// Makes every read once, up to `threads` in flight, the caller's among them, and returns when none is
// under way. Calls at the same time share the threads, which are kept.
void read_file(const FileReads& reads, int threads);

}  // namespace hillinfer
