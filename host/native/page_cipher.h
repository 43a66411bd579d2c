// SPDX-License-Identifier: Apache-2.0
// Pages of 4 KiB sealed one by one with AES-256-GCM, by the system's libcrypto where there is one.
#pragma once
#include <cstdint>

namespace hillinfer {

// A run of pages under one key. Shared with Python: the order and types of these fields are part of
// the C interface.
struct PageRun {
    const uint8_t* key;  // 32 bytes.
    uint8_t* pages;      // Sealed or opened in their place.
    uint8_t* tags;       // 16 bytes for each page.
    int64_t first;       // Number of the first page, whose big-endian bytes are its nonce.
    int64_t count;
    int32_t seals;       // 1: they are sealed; 0: they are opened.
};

// Whether there is a library to do it.
bool has_page_cipher();

// Returns how many pages were done: all, or those before the first one whose tag does not fit, which
// is worth nothing then; below 0 where the library is not there or refused.
int64_t cipher_pages(const PageRun& run);

}  // namespace hillinfer
