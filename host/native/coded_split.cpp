// SPDX-License-Identifier: Apache-2.0
// What of selected sets is exact, what is coded, and where both lie.
#include <algorithm>
#include <vector>

#include "coded_step.h"

namespace hillinfer {
namespace {

// The row of a position in a full group, below 0 where there is none.
int64_t row_of(const LayerTable& table, int64_t position) {
    const int64_t group = position / kGroupTokens;
    return group < table.group_count ? table.groups[group] * kGroupTokens + position % kGroupTokens
                                     : -1;
}

bool is_hot(const PoolTable& pool, int64_t row) {
    return row < pool.row_count && pool.slot_of_row[row] >= 0;
}

}  // namespace

bool split_sets(SplitSelection& split, int64_t length) {
    SelectedSets &exact = *split.exact, &coded = *split.coded;
    coded.set_rows = split.set_rows - exact.set_rows;
    for (int64_t set = 0; set < exact.set_count; ++set) {
        const int64_t* const selected = split.sets + set * split.set_rows;
        const int64_t* const own = exact.sets + set * exact.set_rows;
        int64_t* const out = coded.sets + set * coded.set_rows;
        int64_t next = 0, count = 0;
        for (int64_t i = 0; i < split.set_rows; ++i) {
            if (selected[i] < 0 || selected[i] >= length) {
                return false;
            }
            if (next < exact.set_rows && own[next] == selected[i]) {
                ++next;
            } else if (count < coded.set_rows) {
                out[count++] = selected[i];
            }
        }
        if (next < exact.set_rows) {
            return false;
        }
    }
    join_sets(exact, length);
    join_sets(coded, length);
    return true;
}

bool list_cold(const LayerTable& table, const PoolTable& pool, const CodeSlots& slots,
               int32_t segment_tokens, int64_t held, SplitSelection& split) {
    const SelectedSets &exact = *split.exact, &coded = *split.coded;
    split.cold_count = 0;
    const auto list = [&](int64_t position, int64_t row, int64_t number) {
        split.cold_positions[split.cold_count] = position;
        split.cold_numbers[split.cold_count] = number;
        split.cold_rows[split.cold_count++] = row;
    };
    for (int64_t i = 0, j = 0; i < exact.count || j < coded.count;) {
        const bool is_exact =
            j == coded.count || (i < exact.count && exact.positions[i] <= coded.positions[j]);
        const int64_t position = is_exact ? exact.positions[i] : coded.positions[j];
        i += is_exact;
        // One set may have a token exact and another one coded.
        j += j < coded.count && coded.positions[j] == position;
        if (position >= held) {
            break;
        }
        const int64_t row = row_of(table, position);
        if (row < 0) {
            return false;
        }
        if (is_hot(pool, row)) {
            continue;
        }
        const int64_t segment = position / segment_tokens;
        // Of tokens whose segment's statistics are not taken it is not known what is missing.
        if (is_exact) {
            list(position, row, kNoNumber);
        } else if (segment < split.segment_count &&
                   !find_code(slots, row, split.segments[segment].number)) {
            list(position, row, split.segments[segment].number);
        }
    }
    return true;
}

bool find_split(const LayerTable& table, const PoolTable& pool, const CodeSlots& slots,
                int32_t segment_tokens, const Misses& landed, SplitSelection& split) {
    SelectedSets& coded = *split.coded;
    split.missing_count = split.cold_count = split.settled_count = 0;
    split.read_count = split.rows_end = 0;
    int64_t next = 0;
    for (int64_t i = 0; i < coded.count; ++i) {
        const int64_t position = coded.positions[i];
        const int64_t segment = position / segment_tokens;
        if (segment >= split.segment_count) {
            return false;
        }
        coded.addresses[i] = 0;
        if (position >= table.held) {
            if (position >= table.length || position >= table.held + kGroupTokens) {
                return false;
            }
            continue;
        }
        const int64_t row = row_of(table, position);
        if (row < 0) {
            return false;
        }
        split.rows[split.settled_count++] = row;
        split.rows_end = std::max(split.rows_end, row + 1);
        const int64_t number = split.segments[segment].number;
        coded.addresses[i] = find_code(slots, row, number);
        if (coded.addresses[i]) {
            continue;
        }
        const int64_t at = split.missing_count++;
        split.missing[at] = i;
        split.numbers[at] = number;
        split.sources[at] = 0;
        if (is_hot(pool, row)) {
            split.sources[at] = uint64_t(reinterpret_cast<uintptr_t>(
                pool.data + int64_t(pool.slot_of_row[row]) * pool.row_bytes));
            continue;
        }
        ++split.read_count;
        while (next < landed.landed_count && landed.landed_positions[next] < position) {
            ++next;
        }
        if (next < landed.landed_count && landed.landed_positions[next] == position) {
            split.sources[at] = landed.landed + uint64_t(landed.landed_places[next] * table.row_bytes);
        } else {
            const int64_t cold = split.cold_count++;
            split.cold_positions[cold] = position;
            split.cold_rows[cold] = row;
            split.cold_numbers[cold] = at;
        }
    }
    return true;
}

bool take_coming(SplitSelection& split) {
    if (!split.coming) {
        return false;
    }
    ComingCodes& coming = *split.coming;
    std::vector<int64_t> records(size_t(split.cold_count));
    int64_t next = 0;
    for (int64_t i = 0; i < split.cold_count; ++i, ++next) {
        // Both are in the order of positions.
        const int64_t row = split.cold_rows[i], number = split.numbers[split.cold_numbers[i]];
        while (next < coming.count &&
               (coming.rows[next] != row || coming.numbers[next] != number)) {
            ++next;
        }
        if (next == coming.count) {
            return false;
        }
        records[size_t(i)] = next;
    }
    if (!arrive(*coming.awaited)) {
        return false;
    }
    for (int64_t i = 0; i < split.cold_count; ++i) {
        split.coded->addresses[split.missing[split.cold_numbers[i]]] =
            uint64_t(reinterpret_cast<uintptr_t>(coming.records)) +
            uint64_t(records[size_t(i)] * coming.record_bytes);
    }
    coming.taken = split.cold_count;
    split.read_count -= split.cold_count;
    split.cold_count = 0;
    return true;
}

}  // namespace hillinfer
