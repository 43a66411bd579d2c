// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace hillinfer {
namespace {

// Of a tile's keys that are worked on together: with its values half of a small second cache.
constexpr size_t kRangeBytes = 2048;
// Chunks of a set whose partials are held at a time.
constexpr int64_t kWaveChunks = 64;
// What each thread is to have to choose from, at least.
constexpr int64_t kThreadItems = 4;

size_t partial_floats(int heads, int padded_dim) { return size_t(heads) * (2 + padded_dim); }

Partial partial_in(float* memory, int heads) { return {memory, memory + heads, memory + 2 * heads}; }

void clear(const Partial& partial, int heads, int padded_dim) {
    std::fill_n(partial.largest, heads, -__builtin_inff());
    std::fill_n(partial.sums, heads, 0.0f);
    std::fill_n(partial.outputs, size_t(heads) * padded_dim, 0.0f);
}

void copy(const Partial& into, const Partial& from, int heads, int padded_dim) {
    std::copy_n(from.largest, heads, into.largest);
    std::copy_n(from.sums, heads, into.sums);
    std::copy_n(from.outputs, size_t(heads) * padded_dim, into.outputs);
}

// What a caller keeps: its query in whole vectors, closed chunks merged, and for each KV head the
// chunk that is not full yet.
struct State {
    State(const Attention& attention, void* memory)
        : query(static_cast<float*>(memory)),
          total(partial_in(query + query_floats(attention), attention.query_heads())),
          open(partial_in(total.largest + floats(attention), attention.query_heads())),
          open_rows(reinterpret_cast<int32_t*>(open.largest + floats(attention))) {}

    static size_t query_floats(const Attention& attention) {
        return size_t(attention.query_heads()) * attention.padded_dim();
    }

    static size_t floats(const Attention& attention) {
        return partial_floats(attention.query_heads(), attention.padded_dim());
    }

    static size_t bytes(const Attention& attention) {
        return (query_floats(attention) + 2 * floats(attention) + attention.kv_heads) *
               sizeof(float);
    }

    float* query;
    Partial total;
    Partial open;
    int32_t* open_rows;
};

// Rows of one set that are attended to in one go.
struct Chunk {
    int set;
    const uint64_t* rows;
    int64_t count;
    Partial partial;
};

struct Item {
    const Chunk* chunk;
    HeadRange range;  // Of the layer.
};

// KV heads that are worked on together. Fewer where chunks are few, so that all threads end at about
// the same time; how many makes no difference to a head.
int heads_together(const Attention& attention, int kv_heads, int chunks, int threads) {
    const size_t head_bytes = std::max<size_t>(attention.head_bytes(), 1);
    int together = std::clamp<int>(int(std::min<size_t>(kRangeBytes / head_bytes,
                                                        kMostHeads / attention.group_size)),
                                   1, kv_heads);
    while (threads > 1 && together > 1 &&
           int64_t(chunks) * ((kv_heads + together - 1) / together) < kThreadItems * threads) {
        together = (together + 1) / 2;
    }
    return together;
}

class Wave {
public:
    Wave(const AttentionKernels& kernels, const Attention& attention, int64_t sets,
         const State& state)
        : kernels_(kernels),
          attention_(attention),
          state_(state),
          set_kv_heads_(int(attention.kv_heads / sets)),
          set_heads_(set_kv_heads_ * attention.group_size),
          padded_dim_(attention.padded_dim()) {}

    void run(std::vector<RowSet>& sets) {
        take_chunks(sets);
        int64_t bytes = 0;
        for (const Chunk& chunk : chunks_) {
            bytes += chunk.count * int64_t(set_kv_heads_ * attention_.head_bytes() * 2);
        }
        const int threads = worthwhile_threads(attention_.threads, bytes);
        const int together =
            heads_together(attention_, set_kv_heads_, int(chunks_.size()), threads);
        std::vector<Item> items;
        for (const Chunk& chunk : chunks_) {
            for (int head = 0; head < set_kv_heads_; head += together) {
                items.push_back({&chunk,
                                 {chunk.set * set_kv_heads_ + head,
                                  std::min(together, set_kv_heads_ - head)}});
            }
        }
        run_parallel(threads, int64_t(items.size()), [&](int64_t number, int) {
            const Item& item = items[number];
            const int head = item.range.first * attention_.group_size;
            kernels_.add_rows(
                attention_, state_.query + size_t(head) * padded_dim_, item.range,
                item.chunk->rows, item.chunk->count,
                item.chunk->partial.from(head - item.chunk->set * set_heads_, padded_dim_));
        });
        for (const Chunk& chunk : chunks_) {
            close(chunk);
        }
    }

private:
    Partial open(int set) const { return state_.open.from(set * set_heads_, padded_dim_); }

    // The first chunk continues what is open; the others get memory of their own.
    void take_chunks(std::vector<RowSet>& sets) {
        for (int set = 0; set < int(sets.size()); ++set) {
            RowSet& rows = sets[set];
            for (int64_t number = 0; number < kWaveChunks && rows.count; ++number) {
                const int64_t room = kChunkRows - (number ? 0 : state_.open_rows[set]);
                const int64_t count = std::min(room, rows.count);
                chunks_.push_back({set, rows.rows, count, open(set)});
                rows.rows += count;
                rows.count -= count;
            }
        }
        const size_t own = partial_floats(set_heads_, padded_dim_);
        memory_.reset(new float[own * chunks_.size()]);
        for (size_t i = 1; i < chunks_.size(); ++i) {
            if (chunks_[i].set == chunks_[i - 1].set) {
                chunks_[i].partial = partial_in(memory_.get() + own * i, set_heads_);
                clear(chunks_[i].partial, set_heads_, padded_dim_);
            }
        }
    }

    void close(const Chunk& chunk) {
        int32_t& rows = state_.open_rows[chunk.set];
        const Partial continued = open(chunk.set);
        if (chunk.partial.largest != continued.largest) {
            copy(continued, chunk.partial, set_heads_, padded_dim_);
        }
        rows += int32_t(chunk.count);
        if (rows == kChunkRows) {
            kernels_.merge(state_.total.from(chunk.set * set_heads_, padded_dim_), continued,
                           set_heads_, padded_dim_);
            clear(continued, set_heads_, padded_dim_);
            rows = 0;
        }
    }

    const AttentionKernels& kernels_;
    const Attention& attention_;
    const State& state_;
    const int set_kv_heads_;
    const int set_heads_;
    const int padded_dim_;
    std::vector<Chunk> chunks_;
    std::unique_ptr<float[]> memory_;
};

std::vector<int> item_places(const AttentionKernels& kernels, const Attention& attention) {
    std::vector<int> places(attention.head_dim);
    for (int item = 0; item < attention.head_dim; ++item) {
        places[item] = kernels.item_place(attention.stored_type, item);
    }
    return places;
}

}  // namespace

size_t attention_state_bytes(const Attention& attention) { return State::bytes(attention); }

void begin_attention(const AttentionKernels& kernels, const Attention& attention, void* memory) {
    const State state(attention, memory);
    const int padded_dim = attention.padded_dim();
    std::fill_n(state.query, State::query_floats(attention), 0.0f);
    const std::vector<int> places = item_places(kernels, attention);
    const float* from = attention.query;
    for (int head = 0; head < attention.query_heads(); ++head) {
        for (const int place : places) {
            state.query[size_t(head) * padded_dim + place] = *from++;
        }
    }
    clear(state.total, attention.query_heads(), padded_dim);
    clear(state.open, attention.query_heads(), padded_dim);
    std::fill_n(state.open_rows, attention.kv_heads, 0);
}

void add_rows(const AttentionKernels& kernels, const Attention& attention, const RowSet* sets,
              int64_t set_count, void* memory) {
    const State state(attention, memory);
    std::vector<RowSet> left(sets, sets + set_count);
    while (std::any_of(left.begin(), left.end(), [](const RowSet& set) { return set.count > 0; })) {
        Wave(kernels, attention, set_count, state).run(left);
    }
}

void attention_result(const AttentionKernels& kernels, const Attention& attention,
                      const void* memory, float* out) {
    const State state(attention, const_cast<void*>(memory));
    const int heads = attention.query_heads();
    const int padded_dim = attention.padded_dim();
    const std::unique_ptr<float[]> own(new float[State::floats(attention)]);
    const Partial total = partial_in(own.get(), heads);
    copy(total, state.total, heads, padded_dim);
    kernels.merge(total, state.open, heads, padded_dim);
    const std::vector<int> places = item_places(kernels, attention);
    for (int head = 0; head < heads; ++head) {
        for (const int place : places) {
            *out++ = total.outputs[size_t(head) * padded_dim + place] / total.sums[head];
        }
    }
}

ComingRows::ComingRows(const AttentionKernels& kernels, const Attention& attention, void* memory,
                       const uint64_t* addresses, std::vector<ComingSet> sets, uint8_t* kept)
    : kernels_(&kernels), attention_(&attention), state_(memory), addresses_(addresses),
      sets_(std::move(sets)), kept_(kept),
      set_kv_heads_(int(attention.kv_heads / int64_t(sets_.size()))) {
    for (int number = 0; number < int(sets_.size()); ++number) {
        const ComingSet& set = sets_[size_t(number)];
        const int64_t stop = set.tiled(set.stop);
        for (int64_t row = set.tiled(set.first); row < stop;) {
            const int64_t own = std::min(kChunkRows - row % kChunkRows, stop - row);
            chunks_.push_back({number, row, own, 0, {}});
            row += own;
        }
    }
    const State state(attention, memory);
    const int heads = set_kv_heads_ * attention.group_size, padded_dim = attention.padded_dim();
    const size_t floats = partial_floats(heads, padded_dim);
    memory_.reset(new float[floats * chunks_.size()]);
    for (size_t i = 0; i < chunks_.size(); ++i) {
        Chunk& chunk = chunks_[i];
        chunk.partial = partial_in(memory_.get() + floats * i, heads);
        // What does not begin a chunk goes on with the open one.
        if (chunk.first % kChunkRows) {
            copy(chunk.partial, state.open.from(chunk.set * heads, padded_dim), heads, padded_dim);
        } else {
            clear(chunk.partial, heads, padded_dim);
        }
    }
}

uint64_t ComingRows::address(const ComingSet& set, int64_t row) const {
    if (row < set.first) {
        const size_t row_bytes = 2 * attention_->values_start();
        return uint64_t(reinterpret_cast<uintptr_t>(kept_ + size_t(row % kTileRows) * row_bytes));
    }
    return __atomic_load_n(addresses_ + set.number(row), __ATOMIC_ACQUIRE);
}

// How many rows of a chunk may be attended to by now: whole tiles, or all.
int64_t ComingRows::ready(const Chunk& chunk) const {
    const ComingSet& set = sets_[size_t(chunk.set)];
    int64_t here = chunk.done;
    while (here < chunk.count && address(set, chunk.first + here)) {
        ++here;
    }
    return here == chunk.count ? here : here / kTileRows * kTileRows;
}

// Addresses of the next rows of a chunk, in `memory` where they lie in no order.
const uint64_t* ComingRows::in_order(const Chunk& chunk, int64_t count, uint64_t* memory) const {
    const ComingSet& set = sets_[size_t(chunk.set)];
    const int64_t first = chunk.first + chunk.done;
    if (!set.numbers && first >= set.first) {
        return addresses_ + first;
    }
    for (int64_t i = 0; i < count; ++i) {
        memory[i] = address(set, first + i);
    }
    return memory;
}

void ComingRows::advance() {
    const Attention& attention = *attention_;
    const int kv_heads = set_kv_heads_, padded_dim = attention.padded_dim();
    const int set_heads = kv_heads * attention.group_size;
    std::vector<int64_t> stops;
    int64_t rows = 0;
    for (const Chunk& chunk : chunks_) {
        stops.push_back(std::max(ready(chunk), chunk.done));
        rows += stops.back() - chunk.done;
    }
    if (!rows) {
        return;
    }
    const int64_t bytes = rows * int64_t(2 * kv_heads * attention.head_bytes());
    const int threads = worthwhile_threads(attention.threads, bytes);
    const int chunks = int(chunks_.size());
    const int together = heads_together(attention, kv_heads, chunks, threads);
    const int ranges = (kv_heads + together - 1) / together;
    const State state(attention, state_);
    run_parallel(threads, int64_t(chunks) * ranges, [&](int64_t number, int) {
        const Chunk& chunk = chunks_[size_t(number / ranges)];
        const int64_t count = stops[size_t(number / ranges)] - chunk.done;
        if (!count) {
            return;
        }
        const int first = int(number % ranges) * together;
        const HeadRange range{chunk.set * kv_heads + first, std::min(together, kv_heads - first)};
        const int head = range.first * attention.group_size;
        uint64_t memory[kChunkRows];
        kernels_->add_rows(attention, state.query + size_t(head) * padded_dim, range,
                           in_order(chunk, count, memory), count,
                           chunk.partial.from(head - chunk.set * set_heads, padded_dim));
    });
    for (size_t i = 0; i < chunks_.size(); ++i) {
        chunks_[i].done = stops[i];
    }
}

bool ComingRows::are_here(const ComingSet& set, int64_t first) const {
    for (int64_t row = first; row < set.stop; ++row) {
        if (!address(set, row)) {
            return false;
        }
    }
    return true;
}

// Copies what a set has of an open tile, of its KV heads alone: sets share the rows that are kept.
void ComingRows::keep(int number) {
    const ComingSet& set = sets_[size_t(number)];
    const size_t values = attention_->values_start(), row_bytes = 2 * values;
    const size_t bytes = size_t(set_kv_heads_) * attention_->head_bytes();
    const size_t at = size_t(number) * bytes;
    for (int64_t row = std::max(set.tiled(set.stop), set.first); row < set.stop; ++row) {
        const uint8_t* const from = reinterpret_cast<const uint8_t*>(address(set, row)) + at;
        uint8_t* const to = kept_ + size_t(row % kTileRows) * row_bytes + at;
        std::memcpy(to, from, bytes);
        std::memcpy(to + values, from + values, bytes);
    }
}

bool ComingRows::end() {
    for (const Chunk& chunk : chunks_) {
        if (chunk.done < chunk.count) {
            return false;
        }
    }
    for (const ComingSet& set : sets_) {
        if (!are_here(set, set.tiled(set.stop))) {
            return false;
        }
    }
    const State state(*attention_, state_);
    const int padded_dim = attention_->padded_dim();
    const int heads = set_kv_heads_ * attention_->group_size;
    for (const Chunk& chunk : chunks_) {
        const Partial open = state.open.from(chunk.set * heads, padded_dim);
        int32_t& rows = state.open_rows[chunk.set];
        copy(open, chunk.partial, heads, padded_dim);
        rows += int32_t(chunk.count);
        if (rows == kChunkRows) {
            kernels_->merge(state.total.from(chunk.set * heads, padded_dim), open, heads,
                            padded_dim);
            clear(open, heads, padded_dim);
            rows = 0;
        }
    }
    for (int number = 0; number < int(sets_.size()); ++number) {
        keep(number);
    }
    return true;
}

void attend(const AttentionKernels& kernels, const Attention& attention,
            const std::vector<RowSet>& sets, float* out) {
    // Vectors that cross no line load faster.
    constexpr size_t kLine = 64;
    size_t room = State::bytes(attention) + kLine;
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[room]);
    void* state = memory.get();
    std::align(kLine, State::bytes(attention), state, room);
    begin_attention(kernels, attention, state);
    add_rows(kernels, attention, sets.data(), int64_t(sets.size()), state);
    attention_result(kernels, attention, state, out);
}

}  // namespace hillinfer
