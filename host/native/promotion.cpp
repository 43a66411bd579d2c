// SPDX-License-Identifier: Apache-2.0
#include "promotion.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"

namespace hillinfer {
namespace {

// Rows of the same worth are told apart by so many steps, then by so many positions; with 33 bits of
// worth that fills 64. Python has the same numbers.
constexpr int64_t kSteps = 1 << 10, kPositions = 1 << 20;
constexpr int64_t kPin = int64_t(1) << 31, kKept = 2 * kPin;

struct Row {
    int64_t position;
    int64_t count;
    int64_t last_selected;
    int64_t length;
};

struct Ranked {
    int64_t key;
    int64_t index;
};

int64_t worth_of(const Promotion& moment, const Row& row) {
    switch (moment.worth) {
        case kLastSelected:
            return row.last_selected;
        case kPinnedHits: {
            const double length = double(row.length);
            const bool pinned = double(row.position) >= length - std::ceil(moment.alpha * length);
            return row.count + (pinned ? kPin : 0);
        }
        case kNewest:
            return row.position;
        default:
            return row.count;
    }
}

// Kept tokens come first, then the policy's worth, then what was selected later, then what is newer.
int64_t key_of(const Promotion& moment, const Row& row) {
    const bool kept = row.position < moment.kept_sinks ||
                      row.position >= row.length - moment.kept_recent;
    const int64_t worth = worth_of(moment, row) + (kept ? kKept : 0);
    const int64_t age = std::clamp<int64_t>(moment.step - row.last_selected, 0, kSteps - 1);
    const int64_t newer = std::min(row.position, kPositions - 1);
    return (worth * kSteps + (kSteps - 1 - age)) * kPositions + newer;
}

bool is_larger(const Ranked& one, const Ranked& other) {
    return one.key != other.key ? one.key > other.key : one.index > other.index;
}

bool is_smaller(const Ranked& one, const Ranked& other) {
    return one.key != other.key ? one.key < other.key : one.index < other.index;
}

// Candidates that are not hot, the best first.
std::vector<Ranked> ranked_candidates(const PoolTable& slots, const Promotion& promotion) {
    std::vector<Ranked> ranked;
    for (int64_t i = 0; i < promotion.count; ++i) {
        if (slots.slot_of_row[promotion.rows[i]] >= 0) {
            continue;
        }
        const Row row{promotion.positions[i], promotion.counts[i], promotion.step, promotion.length};
        ranked.push_back({promotion.keys ? promotion.keys[i] : key_of(promotion, row), i});
    }
    std::sort(ranked.begin(), ranked.end(), is_larger);
    return ranked;
}

// Those of `most` slots that rank lowest, the lowest first, of rows that nobody looks at now.
std::vector<Ranked> lowest_slots(const PoolTable& slots, const Promotion& promotion, size_t most) {
    std::vector<Ranked> ranked;
    for (int64_t slot = 0; slot < slots.used; ++slot) {
        if (slots.rows[slot] < 0 || slots.last_selected[slot] >= promotion.settled_before) {
            continue;
        }
        const Row row{slots.positions[slot], slots.counts[slot], slots.last_selected[slot],
                      slots.lengths[slot]};
        ranked.push_back({promotion.slot_keys ? promotion.slot_keys[slot] : key_of(promotion, row), slot});
    }
    // A pool of many rows is never sorted whole.
    if (most < ranked.size()) {
        std::nth_element(ranked.begin(), ranked.begin() + int64_t(most), ranked.end(), is_smaller);
        ranked.resize(most);
    }
    std::sort(ranked.begin(), ranked.end(), is_smaller);
    return ranked;
}

void fill(const PoolTable& slots, const Promotion& promotion, int64_t slot, int64_t candidate) {
    const int64_t row = promotion.rows[candidate];
    std::memcpy(slots.data + slot * slots.row_bytes,
                promotion.source + promotion.places[candidate] * slots.row_bytes,
                size_t(slots.row_bytes));
    slots.rows[slot] = row;
    slots.positions[slot] = promotion.positions[candidate];
    slots.counts[slot] = promotion.counts[candidate];
    slots.last_selected[slot] = promotion.step;
    slots.lengths[slot] = promotion.length;
    slots.slot_of_row[row] = int32_t(slot);
}

}  // namespace

bool promote(const PoolTable& slots, Promotion& promotion) {
    for (int64_t i = 0; i < promotion.count; ++i) {
        if (promotion.rows[i] < 0 || promotion.rows[i] >= slots.row_count ||
            promotion.places[i] < 0 || promotion.places[i] >= promotion.source_rows) {
            return false;
        }
    }
    const std::vector<Ranked> best = ranked_candidates(slots, promotion);
    std::vector<int64_t> into;
    for (int64_t slot = 0; slot < slots.used && into.size() < best.size(); ++slot) {
        if (slots.rows[slot] < 0) {
            into.push_back(slot);
        }
    }
    const size_t free = into.size();
    if (free < best.size()) {
        for (const Ranked& lowest : lowest_slots(slots, promotion, best.size() - free)) {
            // These rise and candidates fall, so once one stays all after it do.
            if (lowest.key >= best[into.size()].key) {
                break;
            }
            into.push_back(lowest.index);
        }
    }
    for (size_t i = free; i < into.size(); ++i) {
        slots.slot_of_row[slots.rows[into[i]]] = -1;
        slots.rows[into[i]] = -1;
    }
    for (size_t i = 0; i < into.size(); ++i) {
        fill(slots, promotion, into[i], best[i].index);
    }
    promotion.promoted = int64_t(into.size());
    promotion.demoted = int64_t(into.size() - free);
    return true;
}

int64_t shrink(SlotPool& pool, int64_t capacity, const Promotion& promotion) {
    if (capacity >= pool.table.used) {
        return 0;
    }
    const int64_t held = pool.table.used - pool.free_slots();
    int64_t demoted = 0;
    if (held > capacity) {
        for (const Ranked& lowest : lowest_slots(pool.table, promotion, size_t(held - capacity))) {
            const int64_t row = pool.table.rows[lowest.index];
            pool.forget(row, row + 1);
            ++demoted;
        }
    }
    pool.pack(capacity);
    return demoted;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_promote(const hillinfer::PoolTable* slots,
                                        hillinfer::Promotion* promotion) {
    bool is_placed = true;
    const int32_t failed =
        hillinfer::guarded([&] { is_placed = hillinfer::promote(*slots, *promotion); });
    return failed ? failed : is_placed ? hillinfer::kDone : hillinfer::kMisplaced;
}

// Returns how many rows were demoted, or below 0 where there was no memory to rank them in.
HILLINFER_API int64_t hillinfer_pool_shrink(hillinfer::SlotPool* pool, int64_t capacity,
                                            const hillinfer::Promotion* promotion) {
    int64_t demoted = 0;
    const int32_t failed =
        hillinfer::guarded([&] { demoted = hillinfer::shrink(*pool, capacity, *promotion); });
    return failed ? -1 : demoted;
}
