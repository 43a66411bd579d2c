// SPDX-License-Identifier: Apache-2.0
#include "tables.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <utility>

#include "api.h"

namespace hillinfer {
namespace {

constexpr int64_t kFirstGroups = 64;

size_t whole_pages(size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    return (std::max<size_t>(bytes, 1) + page - 1) / page * page;
}

// Memory of zeros, which takes none before it is written to.
template <class T>
Memory<T> zeros(int64_t count) {
    T* const memory = static_cast<T*>(std::calloc(size_t(std::max<int64_t>(count, 1)), sizeof(T)));
    if (!memory) {
        throw std::bad_alloc();
    }
    return Memory<T>(memory);
}

// Tables below that are of the heap: sequences have many, and a process may map so many pieces only.
constexpr size_t kMappedBytes = 128 << 10;

}  // namespace

// --- tables that grow ---

Pages::Pages(size_t bytes) {
    if (bytes >= kMappedBytes) {
        void* const mapped = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped != MAP_FAILED) {
            // Where huge pages come unasked they would be memory that nobody counted.
            madvise(mapped, whole_pages(bytes), MADV_NOHUGEPAGE);
            memory = mapped;
            mapped_bytes_ = whole_pages(bytes);
            return;
        }
    }
    memory = std::calloc(std::max<size_t>(bytes, 1), 1);
    if (!memory) {
        throw std::bad_alloc();
    }
}

Pages::~Pages() {
    if (mapped_bytes_) {
        munmap(memory, mapped_bytes_);
    } else {
        std::free(memory);
    }
}

template <class T>
std::unique_ptr<Pages> Growing<T>::cover(int64_t entries) {
    std::unique_ptr<Pages> before;
    if (entries > room_) {
        size_t bytes = size_t(entries) * sizeof(T);
        if (bytes >= kMappedBytes) {
            // A power of two, so that what moves becomes twice as large at least.
            size_t twice = kMappedBytes;
            while (twice < bytes) {
                twice *= 2;
            }
            bytes = twice;
        }
        auto grown = std::make_unique<Pages>(bytes);
        std::copy_n(get(), entries_, static_cast<T*>(grown->memory));
        before = std::exchange(pages_, std::move(grown));
        room_ = int64_t(bytes / sizeof(T));
    }
    entries_ = std::max(entries_, entries);
    return before;
}

// --- sequences ---

void Freed::operator()(void* memory) const { std::free(memory); }

SequenceTables::SequenceTables(int64_t layers, int64_t row_bytes)
    : layers_(size_t(layers)),
      tails_(zeros<uint8_t>(layers * kGroupTokens * row_bytes)),
      tail_bytes_(kGroupTokens * row_bytes),
      hits_(size_t(layers)),
      segments_(size_t(layers)) {
    for (int64_t layer = 0; layer < layers; ++layer) {
        layers_[size_t(layer)].tail = tails_.get() + layer * tail_bytes_;
        layers_[size_t(layer)].row_bytes = row_bytes;
    }
}

SequenceTables::SequenceTables(const SequenceTables& other)
    : SequenceTables(int64_t(other.layers_.size()),
                     other.tail_bytes_ / kGroupTokens) {
    if (layers_.empty()) {
        return;
    }
    std::memcpy(tails_.get(), other.tails_.get(), size_t(tail_bytes_) * layers_.size());
    append_groups(other.layers_[0].groups, other.layers_[0].group_count);
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        const LayerTable& from = other.layers_[layer];
        layers_[layer].length = from.length;
        layers_[layer].held = from.held;
        cover_hits(int64_t(layer), from.hit_count);
        std::copy_n(from.hits, from.hit_count, layers_[layer].hits);
    }
}

void SequenceTables::show_groups() {
    for (LayerTable& table : layers_) {
        __atomic_store_n(&table.groups, groups_.back().get(), __ATOMIC_RELEASE);
    }
}

void SequenceTables::append_groups(const int64_t* numbers, int64_t count) {
    const int64_t before = layers_.empty() ? 0 : layers_[0].group_count;
    if (before + count > group_room_) {
        const int64_t room = std::max({kFirstGroups, 2 * group_room_, before + count});
        Memory<int64_t> grown = zeros<int64_t>(room);
        if (before) {
            std::copy_n(layers_[0].groups, before, grown.get());
        }
        groups_.push_back(std::move(grown));
        group_room_ = room;
        show_groups();
    }
    if (count) {
        std::copy_n(numbers, count, groups_.back().get() + before);
    }
    for (LayerTable& table : layers_) {
        __atomic_store_n(&table.group_count, before + count, __ATOMIC_RELEASE);
    }
}

void SequenceTables::truncate(int64_t length) {
    const int64_t start = length / kGroupTokens * kGroupTokens;
    for (LayerTable& table : layers_) {
        if (table.length > length) {
            table.length = length;
            table.held = start;
        }
        table.group_count = std::min(table.group_count, length / kGroupTokens);
        if (table.hit_count > length) {
            std::fill(table.hits + length, table.hits + table.hit_count, uint16_t(0));
        }
        table.segment_count = 0;
    }
}

std::unique_ptr<Pages> SequenceTables::cover_hits(int64_t layer, int64_t entries) {
    LayerTable& table = layers_[size_t(layer)];
    if (entries <= table.hit_count) {
        return nullptr;
    }
    std::unique_ptr<Pages> before = hits_[size_t(layer)].cover(entries);
    table.hits = hits_[size_t(layer)].get();
    table.hit_count = entries;
    return before;
}

void SequenceTables::describe(int64_t layer, const Segment* segments, int64_t count) {
    std::vector<Segment>& own = segments_[size_t(layer)];
    own.assign(segments, segments + count);
    LayerTable& table = layers_[size_t(layer)];
    table.segments = own.data();
    table.segment_count = count;
    table.coded = count ? own.back().tokens : 0;
}

// --- pools ---

namespace {

constexpr uintptr_t kHugePage = 2 << 20;

// Whether this machine makes huge pages for those who ask.
bool are_huge_pages_allowed() {
    static const bool allowed = [] {
        std::ifstream told("/sys/kernel/mm/transparent_hugepage/enabled");
        std::string text;
        return std::getline(told, text) && text.find("[never]") == std::string::npos;
    }();
    return allowed;
}

}  // namespace

SlotPool* SlotPool::open(int64_t slots, int64_t row_bytes, int* error) {
    SlotPool* const made = new (std::nothrow) SlotPool;
    if (!made) {
        *error = ENOMEM;
        return nullptr;
    }
    PoolTable& table = made->table;
    table.slots = slots;
    table.row_bytes = row_bytes;
    const auto reserve = [&](auto*& column, size_t item_bytes) {
        // Private, because only then does MADV_DONTNEED give pages back.
        void* const memory = mmap(nullptr, whole_pages(size_t(slots) * item_bytes),
                                  PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            *error = errno;
            return;
        }
        column = static_cast<std::remove_reference_t<decltype(column)>>(memory);
    };
    *error = 0;
    reserve(table.data, size_t(row_bytes));
    if (table.data) {
        // Where huge pages come unasked they would be memory that nobody counted.
        madvise(table.data, whole_pages(size_t(slots) * size_t(row_bytes)), MADV_NOHUGEPAGE);
    }
    reserve(table.rows, sizeof *table.rows);
    reserve(table.positions, sizeof *table.positions);
    reserve(table.last_selected, sizeof *table.last_selected);
    reserve(table.lengths, sizeof *table.lengths);
    reserve(table.counts, sizeof *table.counts);
    if (*error) {
        delete made;
        return nullptr;
    }
    return made;
}

SlotPool::~SlotPool() {
    for (const Column& column : columns()) {
        if (column.memory) {
            munmap(column.memory, whole_pages(size_t(table.slots) * column.item_bytes));
        }
    }
}

std::array<SlotPool::Column, 6> SlotPool::columns() const {
    return {{{table.data, size_t(table.row_bytes)},
             {table.rows, sizeof *table.rows},
             {table.positions, sizeof *table.positions},
             {table.last_selected, sizeof *table.last_selected},
             {table.lengths, sizeof *table.lengths},
             {table.counts, sizeof *table.counts}}};
}

std::unique_ptr<Pages> SlotPool::cover(int64_t rows) {
    if (rows <= table.row_count) {
        return nullptr;
    }
    std::unique_ptr<Pages> before = slot_of_row_.cover(rows);
    std::fill(slot_of_row_.get() + table.row_count, slot_of_row_.get() + rows, -1);
    table.slot_of_row = slot_of_row_.get();
    table.row_count = rows;
    return before;
}

void SlotPool::grow(int64_t slots) {
    std::fill_n(table.rows + table.used, slots, int64_t(-1));
    table.used += slots;
    join_pages();
}

// Selected rows lie scattered, and with small pages nearly each has the processor look for its own:
// what is wholly taken becomes huge pages, where the system makes them (Linux 6.1).
void SlotPool::join_pages() {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers do not know.
    const uintptr_t data = reinterpret_cast<uintptr_t>(table.data);
    const uintptr_t first =
        std::max(joined_, (data + kHugePage - 1) / kHugePage * kHugePage);
    const uintptr_t stop =
        (data + uintptr_t(table.used * table.row_bytes)) / kHugePage * kHugePage;
    if (first < stop && are_huge_pages_allowed()) {
        // Those that nobody has touched yet, and those that somebody has.
        madvise(reinterpret_cast<void*>(first), stop - first, MADV_HUGEPAGE);
        for (uintptr_t page = first; page < stop; page += kHugePage) {
            madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse);
        }
        joined_ = stop;
    }
}

int64_t SlotPool::free_slots() const {
    return std::count_if(table.rows, table.rows + table.used, [](int64_t row) { return row < 0; });
}

void SlotPool::forget(int64_t first, int64_t last) {
    for (int64_t row = std::max<int64_t>(first, 0); row < std::min(last, table.row_count); ++row) {
        if (table.slot_of_row[row] >= 0) {
            table.rows[table.slot_of_row[row]] = -1;
            table.slot_of_row[row] = -1;
        }
    }
}

namespace {

uint16_t faded(uint32_t hits, int32_t fades, int32_t shift) {
    // What shifts down to nothing fades no more.
    for (; fades > 0 && hits >> shift; --fades) {
        hits -= hits >> shift;
    }
    return uint16_t(hits);
}

}  // namespace

void SlotPool::refresh(const LayerTable& sequence, int64_t settled, int64_t length, int32_t fades,
                       int32_t shift) {
    for (int64_t slot = 0; slot < table.used; ++slot) {
        const int64_t position = table.positions[slot];
        const int64_t group = position / kGroupTokens;
        if (position >= settled || group >= sequence.group_count ||
            position >= sequence.hit_count) {
            continue;
        }
        if (table.rows[slot] == sequence.groups[group] * kGroupTokens + position % kGroupTokens) {
            table.counts[slot] = faded(sequence.hits[position], fades, shift);
            table.lengths[slot] = int32_t(length);
        }
    }
}

void SlotPool::pack(int64_t capacity) {
    int64_t target = 0;
    for (int64_t slot = capacity; slot < table.used; ++slot) {
        if (table.rows[slot] < 0) {
            continue;
        }
        while (table.rows[target] >= 0) {
            ++target;
        }
        std::memcpy(table.data + target * table.row_bytes, table.data + slot * table.row_bytes,
                    size_t(table.row_bytes));
        table.rows[target] = table.rows[slot];
        table.positions[target] = table.positions[slot];
        table.last_selected[target] = table.last_selected[slot];
        table.lengths[target] = table.lengths[slot];
        table.counts[target] = table.counts[slot];
        table.slot_of_row[table.rows[target]] = int32_t(target);
    }
    table.used = capacity;
    const uintptr_t end = reinterpret_cast<uintptr_t>(table.data + capacity * table.row_bytes);
    if (end / kHugePage * kHugePage < joined_) {
        const uintptr_t last = std::exchange(joined_, end / kHugePage * kHugePage);
        // Whoever touches them again may take a part of them alone.
        const uintptr_t first = std::max(joined_, reinterpret_cast<uintptr_t>(table.data));
        madvise(reinterpret_cast<void*>(first), last - first, MADV_NOHUGEPAGE);
    }
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    for (const Column& column : columns()) {
        const size_t size = whole_pages(size_t(table.slots) * column.item_bytes);
        const size_t first = (size_t(capacity) * column.item_bytes + page - 1) / page * page;
        if (first < size) {
            madvise(static_cast<uint8_t*>(column.memory) + first, size - first, MADV_DONTNEED);
        }
    }
}

}  // namespace hillinfer

using namespace hillinfer;

HILLINFER_API void hillinfer_pages_close(Pages* pages) { delete pages; }

HILLINFER_API int32_t hillinfer_sequence_open(int64_t layers, int64_t row_bytes,
                                              SequenceTables** sequence) {
    return guarded([&] { *sequence = new SequenceTables(layers, row_bytes); });
}

HILLINFER_API int32_t hillinfer_sequence_fork(const SequenceTables* sequence,
                                              SequenceTables** fork) {
    return guarded([&] { *fork = new SequenceTables(*sequence); });
}

HILLINFER_API void hillinfer_sequence_close(SequenceTables* sequence) { delete sequence; }

// Where the tables of all layers lie, one behind the other, as long as the sequence is open.
HILLINFER_API LayerTable* hillinfer_sequence_layers(SequenceTables* sequence) {
    return sequence->layers();
}

HILLINFER_API int32_t hillinfer_sequence_append_groups(SequenceTables* sequence,
                                                       const int64_t* numbers, int64_t count) {
    return guarded([&] { sequence->append_groups(numbers, count); });
}

// Says how many tokens a layer has, and the position of the first row in its tail.
HILLINFER_API void hillinfer_sequence_set_length(SequenceTables* sequence, int64_t layer,
                                                 int64_t length, int64_t held) {
    sequence->layers()[layer].length = length;
    sequence->layers()[layer].held = held;
}

HILLINFER_API void hillinfer_sequence_truncate(SequenceTables* sequence, int64_t length) {
    sequence->truncate(length);
}

// What the counts lay in before they moved is the caller's, to be closed once nobody looks at it.
HILLINFER_API int32_t hillinfer_sequence_cover_hits(SequenceTables* sequence, int64_t layer,
                                                    int64_t entries, Pages** before) {
    return guarded([&] { *before = sequence->cover_hits(layer, entries).release(); });
}

HILLINFER_API int32_t hillinfer_sequence_describe(SequenceTables* sequence, int64_t layer,
                                                  const Segment* segments, int64_t count) {
    return guarded([&] { sequence->describe(layer, segments, count); });
}

// Says how many tokens of a layer's last segment somebody else has coded.
HILLINFER_API void hillinfer_sequence_note_coded(SequenceTables* sequence, int64_t layer,
                                                 int64_t tokens) {
    LayerTable& table = sequence->layers()[layer];
    table.segments[table.segment_count - 1].tokens = tokens;
    table.coded = tokens;
}

// Returns 0, or an error number below 0.
HILLINFER_API int32_t hillinfer_pool_open(int64_t slots, int64_t row_bytes, SlotPool** pool) {
    int error = 0;
    *pool = SlotPool::open(slots, row_bytes, &error);
    return -error;
}

HILLINFER_API void hillinfer_pool_close(SlotPool* pool) { delete pool; }

// What the table lay in before it moved is the caller's, to be closed once nobody looks at it.
HILLINFER_API int32_t hillinfer_pool_cover(SlotPool* pool, int64_t rows, Pages** before) {
    return guarded([&] { *before = pool->cover(rows).release(); });
}

HILLINFER_API void hillinfer_pool_grow(SlotPool* pool, int64_t slots) { pool->grow(slots); }

HILLINFER_API int64_t hillinfer_pool_free_slots(const SlotPool* pool) { return pool->free_slots(); }

HILLINFER_API void hillinfer_pool_forget(SlotPool* pool, int64_t first, int64_t last) {
    pool->forget(first, last);
}

HILLINFER_API void hillinfer_pool_refresh(SlotPool* pool, const LayerTable* sequence, int64_t settled,
                                          int64_t length, int32_t fades, int32_t shift) {
    pool->refresh(*sequence, settled, length, fades, shift);
}
