// SPDX-License-Identifier: Apache-2.0
#include "coded_slots.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "api.h"
#include "halves.h"

namespace hillinfer {
namespace {

// Halves that are not negative rank as their bits do. Nothing that is kept is worth this much.
constexpr uint16_t kStays = 0xFFFF;
constexpr int kBinBits = 4, kBins = 1 << (16 - kBinBits);

float worth_of(uint16_t half) {
    const uint32_t bits = float_of_half(half);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t half_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return half_of(bits);
}

uint8_t* place_of(const CodeSlots& slots, int64_t slot) {
    return reinterpret_cast<uint8_t*>(slots.chunks[slot / kChunkSlots]) +
           slot % kChunkSlots * slots.row_bytes;
}

// A slot or an offered row, and what it is worth.
struct Ranked {
    uint16_t worth;
    int64_t index;
};

// The `most` slots of least worth below a limit, the least first and then the first one; those that
// `stay` has are left out. A pool of many slots is never sorted whole.
std::vector<Ranked> lowest_slots(const CodeSlots& slots, const std::vector<uint8_t>& stay,
                                 uint16_t limit, int64_t most) {
    std::vector<uint16_t> worth(size_t(slots.slot_count));
    std::vector<int64_t> bins(kBins, 0);
    for (int64_t slot = 0; slot < slots.slot_count; ++slot) {
        const bool leaves = slots.rows[slot] >= 0 && !stay[size_t(slot)];
        const uint16_t own = leaves ? slots.worth[slots.rows[slot]] : kStays;
        worth[size_t(slot)] = own < limit ? own : kStays;
        ++bins[worth[size_t(slot)] >> kBinBits];
    }
    int64_t bin = 0, below = 0;
    while (bin < kBins - 1 && below + bins[size_t(bin)] < most) {
        below += bins[size_t(bin++)];
    }
    std::vector<Ranked> lowest;
    for (int64_t slot = 0; slot < slots.slot_count; ++slot) {
        const uint16_t own = worth[size_t(slot)];
        if (own != kStays && own >> kBinBits <= bin) {
            lowest.push_back({own, slot});
        }
    }
    std::stable_sort(lowest.begin(), lowest.end(),
                     [](const Ranked& a, const Ranked& b) { return a.worth < b.worth; });
    lowest.resize(size_t(std::min<int64_t>(most, int64_t(lowest.size()))));
    return lowest;
}

}  // namespace

uint64_t find_code(const CodeSlots& slots, int64_t row, int64_t number) {
    const int32_t slot = row < slots.row_count ? slots.slot_of_row[row] : -1;
    return slot >= 0 && slots.numbers[slot] == number
               ? uint64_t(reinterpret_cast<uintptr_t>(place_of(slots, slot)))
               : 0;
}

void want_codes(const CodeSlots& slots, const int64_t* rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < slots.row_count) {
            uint16_t& own = slots.worth[rows[i]];
            own = half_of_float(std::min(worth_of(own) + slots.step_worth, slots.most_worth));
        }
    }
}

int64_t offer_codes(const CodeSlots& slots, const int64_t* rows, const int64_t* numbers,
                    const uint64_t* codes, int64_t count) {
    int64_t kept = 0;
    std::vector<uint8_t> stay(size_t(slots.slot_count), 0);
    const auto fill = [&](int64_t offered, int64_t slot) {
        std::memcpy(place_of(slots, slot), reinterpret_cast<const void*>(uintptr_t(codes[offered])),
                    size_t(slots.row_bytes));
        slots.rows[slot] = int32_t(rows[offered]);
        slots.numbers[slot] = int32_t(numbers[offered]);
        slots.slot_of_row[rows[offered]] = int32_t(slot);
        stay[size_t(slot)] = 1;
        ++kept;
    };
    std::vector<Ranked> fresh;
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] >= slots.row_count) {
            continue;
        }
        const int32_t slot = slots.slot_of_row[rows[i]];
        if (slot >= 0) {
            fill(i, slot);
        } else {
            fresh.push_back({slots.worth[rows[i]], i});
        }
    }
    size_t next = 0;
    for (int64_t slot = 0; slot < slots.slot_count && next < fresh.size(); ++slot) {
        if (slots.rows[slot] < 0) {
            fill(fresh[next++].index, slot);
        }
    }
    fresh.erase(fresh.begin(), fresh.begin() + int64_t(next));
    if (fresh.empty()) {
        return kept;
    }
    std::stable_sort(fresh.begin(), fresh.end(),
                     [](const Ranked& a, const Ranked& b) { return a.worth > b.worth; });
    const std::vector<Ranked> lowest =
        lowest_slots(slots, stay, fresh[0].worth, int64_t(fresh.size()));
    // These rise and what is offered falls, so once one stays all after it do.
    for (size_t i = 0; i < lowest.size() && fresh[i].worth > lowest[i].worth; ++i) {
        slots.slot_of_row[slots.rows[lowest[i].index]] = -1;
        fill(fresh[i].index, lowest[i].index);
    }
    return kept;
}

}  // namespace hillinfer

using namespace hillinfer;

// See coded_slots.h. A call takes microseconds.
HILLINFER_API void hillinfer_want_codes(const CodeSlots* slots, const int64_t* rows,
                                        int64_t count) {
    want_codes(*slots, rows, count);
}

HILLINFER_API int32_t hillinfer_offer_codes(const CodeSlots* slots, const int64_t* rows,
                                            const int64_t* numbers, const uint64_t* codes,
                                            int64_t count, int64_t* kept) {
    return guarded([&] { *kept = offer_codes(*slots, rows, numbers, codes, count); });
}
