// SPDX-License-Identifier: Apache-2.0
#include "decode_step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "api.h"
#include "choice.h"
#include "halves.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Numbers of a head as they are stored; returns how many did not fit.
int64_t store_numbers(const void* from, int32_t number_type, int count, uint16_t* out) {
    if (number_type != kFloat32Numbers) {
        std::memcpy(out, from, size_t(count) * sizeof *out);
        return 0;
    }
    const uint8_t* const numbers = static_cast<const uint8_t*>(from);
    int64_t overflows = 0;
    for (int i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, numbers + size_t(i) * sizeof bits, sizeof bits);
        const uint32_t magnitude = bits & 0x7FFFFFFF;
        const bool overflowed = magnitude >= kTooLarge && magnitude < kFloatInfinity;
        overflows += overflowed;
        out[i] = overflowed ? uint16_t((bits >> 16 & 0x8000) | kLargestHalf) : half_of(bits);
    }
    return overflows;
}

// What transformers' `apply_rotary_pos_emb` makes of a query, with the same roundings.
const float* turned(const DecodeStep& step, int heads, std::vector<float>& memory) {
    const int dim = step.shape.head_dim, half = dim / 2;
    memory.resize(size_t(heads) * dim);
    for (int head = 0; head < heads; ++head) {
        const float* const own = static_cast<const float*>(step.query) + head * step.head_stride;
        float* const out = memory.data() + size_t(head) * dim;
        for (int i = 0; i < half; ++i) {
            out[i] = own[i] * step.cosines[i] + -own[half + i] * step.sines[i];
            out[half + i] = own[half + i] * step.cosines[half + i] + own[i] * step.sines[half + i];
        }
    }
    return memory.data();
}

// A query as float32, heads one behind the other.
const float* widened(const DecodeStep& step, std::vector<float>& memory) {
    const int dim = step.shape.head_dim;
    const int heads = step.shape.kv_heads * step.group_size;
    if (step.cosines) {
        return turned(step, heads, memory);
    }
    if (step.query_type == kFloat32Numbers && step.head_stride == dim) {
        return static_cast<const float*>(step.query);
    }
    memory.resize(size_t(heads) * dim);
    for (int head = 0; head < heads; ++head) {
        float* const out = memory.data() + size_t(head) * dim;
        if (step.query_type == kFloat32Numbers) {
            std::copy_n(static_cast<const float*>(step.query) + head * step.head_stride, dim, out);
            continue;
        }
        const uint16_t* const own =
            static_cast<const uint16_t*>(step.query) + head * step.head_stride;
        for (int i = 0; i < dim; ++i) {
            const uint32_t bits = step.query_type == kBfloat16Numbers ? uint32_t(own[i]) << 16
                                                                      : float_of_half(own[i]);
            std::memcpy(out + i, &bits, sizeof bits);
        }
    }
    return memory.data();
}

void code_tail(const Kernels& kernels, LayerTable& table, const DecodeStep& step) {
    const Shape& shape = step.shape;
    Segment& segment = table.segments[table.segment_count - 1];
    const int64_t base = (table.segment_count - 1) * shape.segment_tokens;
    const int64_t numbers = int64_t(shape.kv_heads) * shape.head_dim;
    std::vector<uint16_t> halves;
    while (base + segment.tokens < table.length) {
        const int64_t first = base + segment.tokens;
        const int64_t stop = std::min(first / kGroupTokens * kGroupTokens + kGroupTokens,
                                      table.length);
        const uint8_t* const rows = table.tail + (first - table.held) * table.row_bytes;
        const uint16_t* keys = reinterpret_cast<const uint16_t*>(rows);
        int64_t stride = table.row_bytes / 2;
        if (step.stored_type == kBfloat16) {
            halves.resize(size_t((stop - first) * numbers));
            for (int64_t token = 0; token < stop - first; ++token) {
                for (int64_t i = 0; i < numbers; ++i) {
                    halves[size_t(token * numbers + i)] =
                        half_of(uint32_t(keys[token * stride + i]) << 16);
                }
            }
            keys = halves.data();
            stride = numbers;
        }
        kernels.encode(shape, keys, stride, shape.head_dim, 1, segment,
                       const_cast<uint8_t*>(segment.shadow), first - base, stop - first);
        table.coded = segment.tokens = stop - base;
    }
}

}  // namespace

int64_t store_token(LayerTable& table, const Shape& shape, int32_t number_type,
                    const void* keys, int64_t key_stride, const void* values,
                    int64_t value_stride) {
    const int64_t place = table.length % kGroupTokens;
    uint16_t* out = reinterpret_cast<uint16_t*>(table.tail + place * table.row_bytes);
    uint16_t* const end = out + table.row_bytes / 2;
    const int64_t size = number_type == kFloat32Numbers ? 4 : 2;
    int64_t overflows = 0;
    const struct {
        const void* states;
        int64_t stride;
    } parts[] = {{keys, key_stride}, {values, value_stride}};
    for (const auto& part : parts) {
        for (int head = 0; head < shape.kv_heads; ++head, out += shape.head_dim) {
            const uint8_t* const from =
                static_cast<const uint8_t*>(part.states) + head * part.stride * size;
            overflows += store_numbers(from, number_type, shape.head_dim, out);
        }
    }
    std::fill(out, end, uint16_t(0));
    table.held = table.length - place;
    ++table.length;
    return overflows;
}

bool choose_tokens(const Kernels& kernels, LayerTable& table, DecodeStep& step, int64_t* sets,
                   int64_t* exact, int32_t* products) {
    code_tail(kernels, table, step);
    step.coded_at = now();
    std::vector<float> memory;
    const float* const query = widened(step, memory);
    const Sequence sequence{step.shape,          nullptr,      table.segments,
                            table.segment_count, step.threads, step.coming};
    const Choice choice{query,      step.shape.head_dim, step.group_size, step.factor,
                        step.sinks, step.recent,         step.count};
    const bool finite = choose(kernels, sequence, choice, sets, step.exact, exact, products);
    step.chosen_at = now();
    return finite;
}

bool choose_before(const Kernels& kernels, LayerTable& table, DecodeStep& ahead, int64_t* sets,
                   int64_t* exact) {
    LayerTable before = table;
    --before.length;
    ahead.coming = 1;
    const bool finite = choose_tokens(kernels, before, ahead, sets, exact);
    table.coded = before.coded;
    return finite;
}

void tally(const LayerTable& table, const DecodeStep& step, const int64_t* positions,
           int64_t count) {
    if (step.fade_shift) {
        for (int64_t i = 0; i < table.hit_count; ++i) {
            table.hits[i] = uint16_t(table.hits[i] - (table.hits[i] >> step.fade_shift));
        }
    }
    constexpr uint32_t kMost = 0xFFFF;
    const uint32_t hit = step.fade_shift ? (kMost + 1) >> step.fade_shift : 1;
    for (int64_t i = 0; i < count; ++i) {
        uint16_t& own = table.hits[positions[i]];
        own = uint16_t(std::min<uint32_t>(own, kMost - hit) + hit);
    }
}

Found find_selected(const LayerTable& table, const PoolTable& pool, const DecodeStep& step,
                    const int64_t* positions, int64_t count, bool ahead, uint64_t* addresses) {
    Places places = places_of(table, pool, positions, count, ahead ? -1 : step.step);
    if (ahead) {
        places.held = places.settled;
    }
    return find_rows(places, addresses);
}

void list_misses(const LayerTable& table, const int64_t* positions, int64_t count,
                 uint64_t* addresses, Misses& misses) {
    misses.count = misses.arrived = 0;
    std::vector<int64_t> rest;
    const auto list = [&](int64_t number, int64_t place) {
        const int64_t position = positions[number], at = misses.count++;
        misses.numbers[at] = number;
        misses.rows[at] = table.groups[position / kGroupTokens] * kGroupTokens +
                          position % kGroupTokens;
        misses.places[at] = place;
        misses.positions[at] = int32_t(position);
        misses.hits[at] = position < table.hit_count ? table.hits[position] : uint16_t(0);
    };
    int64_t next = 0;
    for (int64_t number = 0; number < count; ++number) {
        if (addresses[number]) {
            continue;
        }
        while (next < misses.landed_count && misses.landed_positions[next] < positions[number]) {
            ++next;
        }
        if (next < misses.landed_count && misses.landed_positions[next] == positions[number]) {
            const int64_t place = misses.landed_places[next];
            addresses[number] = misses.landed + uint64_t(place * table.row_bytes);
            list(number, place);
        } else {
            rest.push_back(number);
        }
    }
    misses.arrived = misses.count;
    for (const int64_t number : rest) {
        list(number, misses.count - misses.arrived);
    }
}

Attention attention_of(const DecodeStep& step, std::vector<float>& memory) {
    return {widened(step, memory), step.shape.kv_heads, step.group_size, step.shape.head_dim,
            step.stored_type,      step.scaling,        step.threads};
}

void attend_selected(const AttentionKernels& kernels, const DecodeStep& step,
                     const SelectedSets& selected, float* out) {
    std::vector<float> memory;
    std::vector<uint64_t> addresses;
    attend(kernels, attention_of(step, memory), rows_of_sets(selected, addresses), out);
}

bool have_arrived(Misses& misses) {
    misses.count = misses.arrived = 0;
    return !misses.coming || arrive(*misses.coming);
}

Found attend_joined(int32_t variant, const LayerTable& table, const PoolTable& pool,
                    const DecodeStep& step, SelectedSets& selected, Misses& misses, float* out) {
    const int64_t* const positions = selected.positions;
    if (step.fade_shift >= 0) {
        tally(table, step, positions, selected.count);
    }
    Found found = find_selected(table, pool, step, positions, selected.count, false,
                                selected.addresses);
    if (found == kSomeCold) {
        list_misses(table, positions, selected.count, selected.addresses, misses);
        found = misses.arrived == misses.count ? kAllHot : kSomeCold;
    }
    if (found == kAllHot) {
        attend_selected(*attention_kernels(variant), step, selected, out);
    }
    return found;
}

int32_t outcome_of(Found found) {
    return found == kAllHot ? kDone : found == kSomeCold ? kCold : kMisplaced;
}

// A choice that another thread makes, with all that it was asked.
struct ChoiceAhead {
    ChoiceAhead(const Kernels& kernels, LayerTable& table, int64_t past, const DecodeStep& asked,
                int64_t* sets, int64_t* exact)
        : step(asked), errand([this, &kernels, &table, past, seen = table, sets, exact]() mutable {
              // Whoever begins late may have stored the token that it is about.
              seen.length = past;
              bool finite = true;
              outcome = guarded([&] { finite = choose_tokens(kernels, seen, step, sets, exact); });
              outcome = finite ? outcome : kNotFinite;
              table.coded = seen.coded;
          }) {
        const float* const from = widened(asked, query);
        if (query.empty()) {
            query.assign(from, from + size_t(asked.shape.kv_heads) * asked.group_size *
                                          asked.shape.head_dim);
        }
        step.query = query.data();
        step.head_stride = asked.shape.head_dim;
        step.query_type = kFloat32Numbers;
        step.cosines = step.sines = nullptr;
        // The caller has the others.
        step.threads = 1;
    }

    std::vector<float> query;
    DecodeStep step;
    int32_t outcome = kDone;
    Errand errand;
};

int32_t end_choice(ChoiceAhead*& ahead) {
    if (!ahead) {
        return kDone;
    }
    const std::unique_ptr<ChoiceAhead> own(ahead);
    own->errand.end();
    ahead = nullptr;
    return own->outcome;
}

}  // namespace hillinfer

using namespace hillinfer;

// See decode_step.h.
HILLINFER_API int64_t hillinfer_store_token(LayerTable* table, const Shape* shape,
                                            int32_t number_type, const void* keys,
                                            int64_t key_stride, const void* values,
                                            int64_t value_stride) {
    // The layer attends in a moment.
    expect_parallel();
    return store_token(*table, *shape, number_type, keys, key_stride, values, value_stride);
}

// Chooses sets and says which rows they have; where a pool is given, looks whether all that are stored
// are hot: kCold where one of them is not.
HILLINFER_API int32_t hillinfer_choose_tokens(int32_t variant, LayerTable* table,
                                              const PoolTable* pool, DecodeStep* step,
                                              SelectedSets* selected) {
    bool finite = true;
    Found found = kAllHot;
    const int32_t outcome = guarded([&] {
        finite = choose_tokens(*scoring_kernels(variant), *table, *step, selected->sets);
        if (!finite) {
            return;
        }
        selected->set_rows = step->count;
        join_sets(*selected, table->length + step->coming);
        if (pool) {
            found = find_selected(*table, *pool, *step, selected->positions,
                                  selected->count - step->coming, true, selected->addresses);
        }
    });
    if (outcome != kDone) {
        return outcome;
    }
    return !finite ? kNotFinite : found == kAllHot ? kDone : kCold;
}

// Begins to choose in a thread of the library's own; `end` must follow and returns what
// hillinfer_choose_tokens without a pool does. The sequence and the sets must stay until then; of its
// table only the tail's rows that are there, and the segments. Exact ones are told where they are wanted.
// It is chosen for the token behind `past` others, which may be stored already where its group goes on.
HILLINFER_API int32_t hillinfer_choose_begin(int32_t variant, LayerTable* table,
                                             int64_t past, const DecodeStep* step,
                                             int64_t* sets, int64_t* exact,
                                             ChoiceAhead** ahead) {
    return guarded([&] {
        std::unique_ptr<ChoiceAhead> own(
            new ChoiceAhead(*scoring_kernels(variant), *table, past, *step, sets, exact));
        own->errand.begin();
        *ahead = own.release();
    });
}

// See end_choice.
HILLINFER_API int32_t hillinfer_choose_end(ChoiceAhead** ahead) { return end_choice(*ahead); }

// Counts rows of selected sets as hits, finds them and, where all of them are in memory, attends to
// the sets; else kCold, or kMisplaced for a position that is nowhere. What was not hot is listed as
// misses, also where all of it was read ahead, and nothing where that did not come. Hits are left alone
// where the shift is negative: Python counts them.
HILLINFER_API int32_t hillinfer_attend_tokens(int32_t variant, const LayerTable* table,
                                              const PoolTable* pool, const DecodeStep* step,
                                              SelectedSets* selected, Misses* misses,
                                              float* out) {
    misses->count = misses->arrived = 0;
    const int64_t all = selected->set_count * selected->set_rows;
    for (int64_t i = 0; i < all; ++i) {
        if (selected->sets[i] < 0 || selected->sets[i] >= table->length) {
            return kMisplaced;
        }
    }
    Found found = kSomeCold;
    const int32_t outcome = guarded([&] {
        if (!have_arrived(*misses)) {
            return;
        }
        join_sets(*selected, table->length);
        found = attend_joined(variant, *table, *pool, *step, *selected, *misses, out);
    });
    return outcome != kDone ? outcome : outcome_of(found);
}

// Chooses and attends, one behind the other.
HILLINFER_API int32_t hillinfer_decode_step(int32_t variant, LayerTable* table,
                                            const PoolTable* pool, DecodeStep* step,
                                            SelectedSets* selected, Misses* misses, float* out) {
    misses->count = misses->arrived = 0;
    int32_t outcome = hillinfer_choose_tokens(variant, table, nullptr, step, selected);
    if (outcome != kDone) {
        return outcome;
    }
    Found found = kAllHot;
    outcome = guarded([&] {
        found = attend_joined(variant, *table, *pool, *step, *selected, *misses, out);
    });
    return outcome != kDone ? outcome : outcome_of(found);
}

// Ends a choice that was begun with the memory of these sets, and attends to them.
HILLINFER_API int32_t hillinfer_attend_chosen(ChoiceAhead** ahead, int32_t variant,
                                              const LayerTable* table, const PoolTable* pool,
                                              const DecodeStep* step, SelectedSets* selected,
                                              Misses* misses, float* out) {
    misses->count = misses->arrived = 0;
    const std::unique_ptr<ChoiceAhead> own(*ahead);
    own->errand.end();
    *ahead = nullptr;
    if (own->outcome != kDone) {
        return own->outcome;
    }
    Found found = kAllHot;
    const int32_t outcome = guarded([&] {
        selected->set_rows = own->step.count;
        join_sets(*selected, table->length);
        found = attend_joined(variant, *table, *pool, *step, *selected, *misses, out);
    });
    return outcome != kDone ? outcome : outcome_of(found);
}

// Chooses by the predicted query that `ahead` asks with and attends by the true one of `step`, to the
// newest token too.
HILLINFER_API int32_t hillinfer_decode_predicted(int32_t variant, LayerTable* table,
                                                 const PoolTable* pool, DecodeStep* ahead,
                                                 const DecodeStep* step, SelectedSets* selected,
                                                 Misses* misses, float* out) {
    misses->count = misses->arrived = 0;
    bool finite = true;
    Found found = kAllHot;
    const int32_t outcome = guarded([&] {
        finite = choose_before(*scoring_kernels(variant), *table, *ahead, selected->sets);
        if (finite) {
            selected->set_rows = ahead->count;
            join_sets(*selected, table->length);
            found = attend_joined(variant, *table, *pool, *step, *selected, *misses, out);
        }
    });
    if (outcome != kDone) {
        return outcome;
    }
    return finite ? outcome_of(found) : kNotFinite;
}
