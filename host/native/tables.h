// SPDX-License-Identifier: Apache-2.0
// The tables of sequences and hot pools: made, changed and freed here. Python has a handle, changes
// them by calls, and looks at them where they lie.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shape.h"

namespace hillinfer {

// The block table of one sequence in one layer, with its hit counts and the descriptors of its
// shadow. Python looks at these words: their order and types, and those of the fields below, are part
// of the C interface.
struct LayerTable {
    const int64_t* groups;
    int64_t group_count;
    uint8_t* tail;  // Rows from `held` on.
    int64_t row_bytes;
    int64_t length;
    int64_t held;
    uint16_t* hits;
    int64_t hit_count;
    Segment* segments;  // All that are coded; the last one may be open.
    int64_t segment_count;
    int64_t coded;  // Tokens of the last segment.
};

struct Freed {
    void operator()(void* memory) const;
};
// From `malloc` or `calloc`.
template <class T>
using Memory = std::unique_ptr<T[], Freed>;

// Memory of a table, zeros at first. Where it is large it is address space, whose pages are memory
// once they are written to.
class Pages {
public:
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    void* memory = nullptr;

private:
    size_t mapped_bytes_ = 0;  // 0 where it is of the heap.
};

// Entries that stay where they lie as they become more, as a rule. A table of the heap that grows by a
// copy leaves its old place behind, which nothing counts.
template <class T>
class Growing {
public:
    // Makes room for so many entries, zeros behind those before. Where they moved, returns what they
    // lay in, which somebody may still look at.
    std::unique_ptr<Pages> cover(int64_t entries);
    T* get() const { return pages_ ? static_cast<T*>(pages_->memory) : nullptr; }

private:
    std::unique_ptr<Pages> pages_;
    int64_t entries_ = 0;
    int64_t room_ = 0;
};

// All layers of one sequence. Calls that change it come from one thread at a time.
class SequenceTables {
public:
    SequenceTables(int64_t layers, int64_t row_bytes);
    // One that has the same and goes on by itself; it knows no shadow.
    SequenceTables(const SequenceTables& other);
    SequenceTables& operator=(const SequenceTables&) = delete;

    LayerTable* layers() { return layers_.data(); }
    void append_groups(const int64_t* numbers, int64_t count);
    // Forgets positions from `length` on, in every layer, with their groups, hits and descriptors.
    void truncate(int64_t length);
    // Makes room for the hits of so many positions of a layer. Where they moved, returns what they lay
    // in, which somebody may still look at.
    std::unique_ptr<Pages> cover_hits(int64_t layer, int64_t entries);
    void describe(int64_t layer, const Segment* segments, int64_t count);

private:
    void show_groups();

    std::vector<LayerTable> layers_;
    Memory<uint8_t> tails_;
    int64_t tail_bytes_;  // Of one layer.
    // Tables of groups that were too small stay before the last one, for who still looks at them: each
    // was half as large as the next, or less.
    std::vector<Memory<int64_t>> groups_;
    int64_t group_room_ = 0;
    std::vector<Growing<uint16_t>> hits_;
    std::vector<std::vector<Segment>> segments_;
};

// The slots of a layer's hot pool: which row is where, and what is known of it.
struct PoolTable {
    int32_t* slot_of_row;  // Below 0 where a row is not hot.
    int64_t row_count;
    uint8_t* data;
    int64_t row_bytes;
    // An entry for each slot: its row, below 0 where it is free, and what is known of that.
    int64_t* rows;
    int32_t* positions;
    int32_t* last_selected;
    int32_t* lengths;
    uint16_t* counts;
    int64_t used;
    int64_t slots;  // That address space is reserved for.
};

// A pool with its memory, which is taken as slots are used and given back as it shrinks.
class SlotPool {
public:
    // Null, and an error number, where the system does not reserve so much.
    static SlotPool* open(int64_t slots, int64_t row_bytes, int* error);
    ~SlotPool();
    SlotPool(const SlotPool&) = delete;
    SlotPool& operator=(const SlotPool&) = delete;

    // First of all: its address is the pool's.
    PoolTable table{};

    // Makes room for row numbers below `rows`. Where the table moved, returns what it lay in, which
    // somebody may still look at.
    std::unique_ptr<Pages> cover(int64_t rows);
    // Takes so many slots more, free at first.
    void grow(int64_t slots);
    int64_t free_slots() const;
    // Drops rows of first <= row < last.
    void forget(int64_t first, int64_t last);
    // Learns what a sequence's hits are now, of its rows below `settled`. They have faded so often
    // since, each time by themselves shifted down so far.
    void refresh(const LayerTable& sequence, int64_t settled, int64_t length, int32_t fades,
                 int32_t shift);
    // Moves rows together below `capacity`, of which there are no more, and gives the rest back.
    void pack(int64_t capacity);

private:
    struct Column {
        void* memory;
        size_t item_bytes;
    };

    SlotPool() = default;
    std::array<Column, 6> columns() const;
    void join_pages();

    // Where rows begin that no huge page holds.
    uintptr_t joined_ = 0;
    Growing<int32_t> slot_of_row_;
};

}  // namespace hillinfer
