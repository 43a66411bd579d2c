// SPDX-License-Identifier: Apache-2.0
// Pages of 4 KiB sealed one by one with AES-256-GCM, by the system's libcrypto where there is one.
#pragma once
#include <cstdint>
#include <mutex>

namespace hillinfer {

// A run of pages under one key. The nonce of a page is how often it was sealed, 4 bytes, and its number,
// 8 bytes, the highest first. Shared with Python: the order and types of these fields are part of
// the C interface.
struct PageRun {
    const uint8_t* key;  // 32 bytes.
    uint8_t* pages;      // Sealed or opened in their place.
    uint8_t* tags;       // 16 bytes for each page.
    const uint32_t* writes;  // Of each page, how often it was sealed; null where once.
    int64_t first;       // Number of the first page.
    int64_t count;
    int32_t seals;       // 1: they are sealed; 0: they are opened.
};

constexpr int64_t kSealedPageBytes = 4096;

// Sealed pages that lie one behind the other in a file. Shared with Python, too.
struct PageSeal {
    const uint8_t* key;      // 32 bytes.
    const uint8_t* tags;     // 16 bytes for each page.
    const uint32_t* writes;  // As in a run.
    int64_t origin;          // The byte of the file that the first page begins at.
    int64_t count;
    int64_t first;           // Number of the first page.
};

// Opens pages in their place, one after the other. A thread has one of its own.
class PageOpener {
public:
    PageOpener() = default;
    ~PageOpener();
    PageOpener(const PageOpener&) = delete;
    PageOpener& operator=(const PageOpener&) = delete;

    // False where the tag of the page at an index is another, whose bytes are worth nothing then.
    bool open(const PageSeal& seal, int64_t index, uint8_t* page) noexcept;

    PageOpener* next = nullptr;

private:
    void* context_ = nullptr;
    const uint8_t* key_ = nullptr;
};

// Openers of several threads, each used by one at a time.
class PageOpeners {
public:
    PageOpeners() = default;
    ~PageOpeners();
    PageOpeners(const PageOpeners&) = delete;
    PageOpeners& operator=(const PageOpeners&) = delete;

    // Null where there is no memory.
    PageOpener* take() noexcept;
    void give(PageOpener* opener) noexcept;

private:
    std::mutex changing_;
    PageOpener* idle_ = nullptr;
};

// Whether there is a library to do it.
bool has_page_cipher();

// Returns how many pages were done: all, or those before the first one whose tag does not fit, which
// is worth nothing then; below 0 where the library is not there or refused.
int64_t cipher_pages(const PageRun& run);

}  // namespace hillinfer
