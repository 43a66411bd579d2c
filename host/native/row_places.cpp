// SPDX-License-Identifier: Apache-2.0
#include "row_places.h"

#include <cstring>

#include "api.h"

namespace hillinfer {

Places places_of(const LayerTable& table, const PoolTable& pool, const int64_t* positions,
                 int64_t count, int32_t step) {
    return {positions,
            count,
            table.length / kGroupTokens * kGroupTokens,
            table.held,
            table.length,
            uint64_t(reinterpret_cast<uintptr_t>(table.tail)),
            table.groups,
            table.group_count,
            pool.slot_of_row,
            pool.row_count,
            step < 0 ? nullptr : pool.last_selected,
            uint64_t(reinterpret_cast<uintptr_t>(pool.data)),
            table.row_bytes,
            step};
}

Found find_rows(const Places& places, uint64_t* out) {
    bool cold = false;
    for (int64_t i = 0; i < places.count; ++i) {
        const int64_t position = places.positions[i];
        if (position < 0 || position >= places.length) {
            return kNowhere;
        }
        int32_t slot = -1;
        if (position < places.settled) {
            const int64_t group = position / kGroupTokens;
            const int64_t row = group < places.group_count
                                    ? places.groups[group] * kGroupTokens + position % kGroupTokens
                                    : -1;
            if (row < 0 || row >= places.row_count) {
                return kNowhere;
            }
            slot = places.slot_of_row[row];
            if (slot >= 0 && places.stamps) {
                // Sequences that attend at once may share the row.
                __atomic_store_n(places.stamps + slot, places.step, __ATOMIC_RELAXED);
            }
        }
        if (position >= places.held) {
            if (position - places.held >= kGroupTokens) {
                return kNowhere;
            }
            out[i] = places.tail + uint64_t((position - places.held) * places.row_bytes);
        } else {
            cold |= slot < 0;
            out[i] = slot >= 0 ? places.slots + uint64_t(slot) * uint64_t(places.row_bytes) : 0;
        }
    }
    return cold ? kSomeCold : kAllHot;
}

void copy_rows(const uint64_t* rows, int64_t count, int64_t row_bytes, uint8_t* out) {
    for (int64_t i = 0; i < count; ++i, out += row_bytes) {
        const uint8_t* const from = reinterpret_cast<const uint8_t*>(rows[i]);
        if (from != out) {
            std::memcpy(out, from, size_t(row_bytes));
        }
    }
}

}  // namespace hillinfer

// Returns 0, or -1 for a position that is nowhere.
HILLINFER_API int64_t hillinfer_find_rows(const hillinfer::LayerTable* table,
                                          const hillinfer::PoolTable* pool,
                                          const int64_t* positions, int64_t count, int32_t step,
                                          uint64_t* out) {
    const hillinfer::Places places =
        hillinfer::places_of(*table, *pool, positions, count, step);
    return hillinfer::find_rows(places, out) == hillinfer::kNowhere ? -1 : 0;
}

HILLINFER_API void hillinfer_copy_rows(const uint64_t* rows, int64_t count, int64_t row_bytes,
                                       uint8_t* out) {
    hillinfer::copy_rows(rows, count, row_bytes, out);
}
