// SPDX-License-Identifier: Apache-2.0
#include "sheets.h"

#include <cstring>

#include "api.h"
#include "crc32c.h"
#include "prefix_keys.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kGroups = 16;
constexpr int64_t kGroupIdBytes = 64 * 4;
constexpr int32_t kMore = -1;
// Fewer chunks take less time than waking a thread.
constexpr int64_t kWorthwhile = 32;
constexpr int kThreads = 4;
constexpr int64_t kAhead = 2;
constexpr int64_t kLineBytes = 64;
constexpr char kMagic[] = "HillKV\r\n";

// Where things are in a header; numbers are little-endian, as those of every machine that we run on.
enum Place : int64_t {
    kVersionAt = 8,
    kSaidAt = 16,
    kParentAt = 64,
    kKeyAt = 96,
    kGroupsAt = 140,
    kSizesAt = 144,
    kBodySumAt = 168,
    kSumAt = kPageBytes - 4,
};
constexpr size_t kSaidBytes = kParentAt - kSaidAt;

uint32_t number_at(const uint8_t* page, int64_t place) {
    uint32_t number;
    std::memcpy(&number, page + place, sizeof number);
    return number;
}

bool is_whole(const SheetMatch& match, const uint8_t* page, const uint8_t* body) {
    const uint32_t groups = number_at(page, kGroupsAt);
    return !std::memcmp(page, kMagic, sizeof kMagic - 1) &&
           number_at(page, kVersionAt) == match.version &&
           !std::memcmp(page + kSaidAt, match.said, kSaidBytes) && groups > 0 &&
           groups <= kGroups && number_at(page, kSizesAt) == match.layers &&
           number_at(page, kSizesAt + 4) == match.row_bytes &&
           number_at(page, kSizesAt + 8) == match.shadow_bytes &&
           crc32c(0, page, kSumAt) == number_at(page, kSumAt) &&
           crc32c(0, body, match.body_bytes) == number_at(page, kBodySumAt);
}

int32_t covered(const SheetMatch& match, int64_t chunk, const uint8_t* page, const uint8_t* body) {
    if (!is_whole(match, page, body)) {
        return 0;
    }
    const int64_t groups = number_at(page, kGroupsAt);
    if (groups > match.groups[chunk]) {
        return kMore;
    }
    const uint8_t* const ids = match.ids + chunk * kGroups * kGroupIdBytes;
    const uint8_t* const last = match.keys + (chunk * kGroups + groups - 1) * kKeyBytes;
    const bool same = !std::memcmp(page + kParentAt, match.parents + chunk * kKeyBytes, kKeyBytes) &&
                      !std::memcmp(body, ids, size_t(groups * kGroupIdBytes)) &&
                      !std::memcmp(page + kKeyAt, last, kKeyBytes);
    return same ? int32_t(groups) : 0;
}

// A drive has just brought them, past the caches: to wait for line after line takes longer than all
// that is done with them.
void ask_for(const SheetMatch& match, int64_t chunk) {
    if (chunk < match.count) {
        const uint8_t* const pages = match.data + chunk * match.extent_bytes;
        const uint8_t* const stop = pages + 2 * kPageBytes + match.body_bytes;
        for (const uint8_t* line = pages; line < stop; line += kLineBytes) {
            __builtin_prefetch(line);
        }
    }
}

}  // namespace

void match_sheets(const SheetMatch& match) {
    const int threads = match.count < kWorthwhile ? 1 : kThreads;
    run_parallel(threads, match.count, [&](int64_t chunk, int) {
        const uint8_t* const pages = match.data + chunk * match.extent_bytes;
        ask_for(match, chunk + kAhead);
        for (int64_t slot = 0; slot < 2; ++slot) {
            const uint8_t* const body = pages + 2 * kPageBytes + slot * match.body_bytes;
            match.covered[2 * chunk + slot] =
                covered(match, chunk, pages + slot * kPageBytes, body);
        }
    });
}

}  // namespace hillinfer

HILLINFER_API void hillinfer_match_sheets(const hillinfer::SheetMatch* match) {
    hillinfer::match_sheets(*match);
}
