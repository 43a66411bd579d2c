// SPDX-License-Identifier: Apache-2.0
#include "selected_sets.h"

#include <algorithm>

namespace hillinfer {

void join_sets(SelectedSets& selected, int64_t length) {
    if (selected.set_count == 1) {
        selected.count = selected.set_rows;
        return;
    }
    const int64_t all = selected.set_count * selected.set_rows;
    // Of each token: whether some set has it, and then which of the rows it is.
    std::vector<int32_t> number(size_t(length), 0);
    for (int64_t i = 0; i < all; ++i) {
        number[size_t(selected.sets[i])] = 1;
    }
    int64_t count = 0;
    for (int64_t position = 0; position < length; ++position) {
        if (number[size_t(position)]) {
            number[size_t(position)] = int32_t(count);
            selected.positions[count++] = position;
        }
    }
    selected.count = count;
    for (int64_t i = 0; i < all; ++i) {
        selected.numbers[i] = number[size_t(selected.sets[i])];
    }
}

std::vector<RowSet> rows_of_sets(const SelectedSets& selected, std::vector<uint64_t>& memory) {
    if (!selected.numbers) {
        return {{selected.addresses, selected.count}};
    }
    memory.resize(size_t(selected.set_count * selected.set_rows));
    for (size_t i = 0; i < memory.size(); ++i) {
        memory[i] = selected.addresses[selected.numbers[i]];
    }
    std::vector<RowSet> sets;
    for (int64_t set = 0; set < selected.set_count; ++set) {
        sets.push_back({memory.data() + set * selected.set_rows, selected.set_rows});
    }
    return sets;
}

std::vector<ComingSet> coming_sets(const SelectedSets& selected, int64_t start, int64_t stop) {
    if (!selected.numbers) {
        return {{nullptr, start, stop, selected.count}};
    }
    std::vector<ComingSet> sets;
    for (int64_t set = 0; set < selected.set_count; ++set) {
        const int32_t* const own = selected.numbers + set * selected.set_rows;
        const int32_t* const end = own + selected.set_rows;
        sets.push_back({own, std::lower_bound(own, end, start) - own,
                        std::lower_bound(own, end, stop) - own, selected.set_rows});
    }
    return sets;
}

}  // namespace hillinfer
