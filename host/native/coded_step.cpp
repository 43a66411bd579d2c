// SPDX-License-Identifier: Apache-2.0
#include "coded_step.h"

#include <chrono>
#include <memory>
#include <vector>

#include "api.h"
#include "choice.h"
#include "coded.h"
#include "group_work.h"
#include "halves.h"
#include "kernels.h"
#include "sequence.h"
#include "step_rows.h"

namespace hillinfer {
namespace {

// What weighs coded tokens: each query head by itself, whatever rule and scope ranked them.
Shape weighing_shape(const DecodeStep& step) {
    Shape shape = step.shape;
    shape.rule = kWeightSum;
    shape.scope = kLayer;
    shape.heads = step.group_size;
    return shape;
}

// Room for the products of all tokens, where as much may be kept; else null.
std::unique_ptr<Aligned<int32_t>> room_for_products(const LayerTable& table, const DecodeStep& step) {
    const int64_t numbers = groups_of(table.length) * kGroupTokens * step.shape.rows();
    if (numbers * int64_t(sizeof(int32_t)) > step.kept_bytes) {
        return nullptr;
    }
    return std::make_unique<Aligned<int32_t>>(size_t(numbers));
}

// Codes the values of rows, each by the statistics of its own segment.
class RowCoder {
public:
    RowCoder(const Kernels& kernels, const DecodeStep& step, const SplitSelection& split)
        : kernels_(kernels), shape_(step.shape), stored_type_(step.stored_type), split_(split),
          numbers_(size_t(shape_.kv_heads) * size_t(shape_.head_dim)) {}

    void code(uint64_t from, int64_t position, uint8_t* out) {
        const uint16_t* values =
            reinterpret_cast<const uint16_t*>(uintptr_t(from)) + numbers_;
        if (stored_type_ == kBfloat16) {
            halves_.resize(numbers_);
            for (size_t i = 0; i < numbers_; ++i) {
                halves_[i] = half_of(uint32_t(values[i]) << 16);
            }
            values = halves_.data();
        }
        const SegmentValues& own = split_.segments[position / shape_.segment_tokens];
        const Segment segment{nullptr, own.exponents, own.means, nullptr, 1};
        const ValuePlaces to{out, split_.row_bytes, out + shape_.code_row_bytes(), split_.row_bytes, 1};
        kernels_.encode_values(shape_, values, int64_t(numbers_), shape_.head_dim, 1, segment, to, 1);
    }

private:
    const Kernels& kernels_;
    const Shape& shape_;
    const int32_t stored_type_;
    const SplitSelection& split_;
    const size_t numbers_;
    std::vector<uint16_t> halves_;
};

// Codes tokens whose rows are here: those that are missing, and behind them those in the tail.
void code_here(const Kernels& kernels, const LayerTable& table, const DecodeStep& step,
               const SplitSelection& split) {
    RowCoder coder(kernels, step, split);
    SelectedSets& coded = *split.coded;
    uint8_t* out = split.arrived;
    for (int64_t i = 0; i < split.missing_count; ++i, out += split.row_bytes) {
        const int64_t number = split.missing[i];
        coded.addresses[number] = uint64_t(reinterpret_cast<uintptr_t>(out));
        if (split.sources[i]) {
            coder.code(split.sources[i], coded.positions[number], out);
        }
    }
    for (int64_t i = split.settled_count; i < coded.count; ++i, out += split.row_bytes) {
        const int64_t position = coded.positions[i];
        coder.code(uint64_t(reinterpret_cast<uintptr_t>(
                       table.tail + (position - table.held) * table.row_bytes)),
                   position, out);
        coded.addresses[i] = uint64_t(reinterpret_cast<uintptr_t>(out));
    }
}

// Coded tokens of one set as attention asks for them.
class CodedSet {
public:
    CodedSet(const Shape& shape, const SplitSelection& split, int64_t set, const uint64_t* codes,
             const int32_t* aligned, const uint8_t* invalid)
        : exponents_(size_t(split.coded->set_rows)) {
        const int64_t count = split.coded->set_rows;
        const int64_t* const positions = split.coded->sets + set * count;
        for (int64_t i = 0; i < count; ++i) {
            exponents_[size_t(i)] = codes[i] + shape.code_row_bytes();
        }
        for (int64_t first = 0; first < count;) {
            const int64_t number = positions[first] / shape.segment_tokens;
            int64_t stop = first + 1;
            while (stop < count && positions[stop] / shape.segment_tokens == number) {
                ++stop;
            }
            const SegmentValues& own = split.segments[number];
            described.push_back({aligned + first, invalid + first, codes + first,
                                 exponents_.data() + first, 1, own.exponents, own.means, count,
                                 stop - first});
            first = stop;
        }
    }

    std::vector<CodedTokens> described;

private:
    std::vector<uint64_t> exponents_;
};

// Attends to sets one after the other; false where the query is not finite.
class SplitAttention {
public:
    SplitAttention(int32_t variant, const LayerTable& table, const DecodeStep& step,
                   const SplitSelection& split, int32_t* products = nullptr)
        : variant_(variant), table_(table), step_(step), split_(split), products_(products),
          shape_(weighing_shape(step)),
          scaled_(size_t(shape_.rows()) * size_t(shape_.head_dim)) {}

    bool run(float* out) {
        std::vector<float> memory;
        const Attention query = attention_of(step_, memory);
        const Choice choice{query.query, shape_.head_dim, step_.group_size, step_.factor, 0, 0, 0};
        if (!scale_query(shape_, choice, scaled_.data())) {
            return false;
        }
        if (!split_.aligned) {
            weigh();
        }
        const int64_t sets = split_.exact->set_count;
        for (int64_t set = 0; set < sets; ++set) {
            attend(set, int(shape_.kv_heads / sets), out);
        }
        return true;
    }

private:
    // L' of all coded tokens.
    void weigh() {
        const int64_t count = split_.coded->count;
        aligned_.reset(new int32_t[size_t(shape_.rows()) * size_t(count) + 1]);
        invalid_.reset(new uint8_t[size_t(shape_.kv_heads) * size_t(count) + 1]);
        const Sequence sequence{shape_,        scaled_.data(), table_.segments, table_.segment_count,
                                step_.threads, 0};
        aligned_tokens(*scoring_kernels(variant_), sequence, split_.coded->positions, count,
                       aligned_.get(), invalid_.get(), products_);
    }

    void attend(int64_t set, int heads, float* out) {
        const SelectedSets &exact = *split_.exact, &coded = *split_.coded;
        const int32_t* aligned = split_.aligned ? split_.aligned[set] : aligned_.get();
        const uint8_t* invalid = split_.invalid ? split_.invalid[set] : invalid_.get();
        const uint64_t *rows = exact.addresses, *codes = coded.addresses;
        if (exact.numbers) {
            rows_.resize(size_t(exact.set_rows));
            codes_.resize(size_t(coded.set_rows));
            gather(exact, exact.addresses, set, rows_.data());
            gather(coded, coded.addresses, set, codes_.data());
            rows = rows_.data();
            codes = codes_.data();
        }
        if (coded.numbers && !split_.aligned) {
            // Of the set's own tokens and heads; nobody looks at the others.
            own_aligned_.resize(size_t(shape_.rows() * coded.set_rows));
            own_invalid_.resize(size_t(shape_.kv_heads * coded.set_rows));
            const int64_t first = set * heads, members = shape_.heads;
            for (int64_t row = first * members; row < (first + heads) * members; ++row) {
                gather(coded, aligned + row * coded.count, set,
                       own_aligned_.data() + row * coded.set_rows);
            }
            for (int64_t head = first; head < first + heads; ++head) {
                gather(coded, invalid + head * coded.count, set,
                       own_invalid_.data() + head * coded.set_rows);
            }
            aligned = own_aligned_.data();
            invalid = own_invalid_.data();
        }
        const CodedSet own(shape_, split_, set, codes, aligned, invalid);
        const CodedAttention call{scaled_.data(),     shape_.kv_heads,    step_.group_size,
                                  shape_.head_dim,    step_.stored_type,  int32_t(set) * heads,
                                  heads,              step_.threads};
        attend_coded(variant_, call, rows, exact.set_rows, own.described.data(),
                     int64_t(own.described.size()), out);
    }

    template <class T>
    static void gather(const SelectedSets& of, const T* from, int64_t set, T* out) {
        const int32_t* const numbers = of.numbers + set * of.set_rows;
        for (int64_t i = 0; i < of.set_rows; ++i) {
            out[i] = from[numbers[i]];
        }
    }

    const int32_t variant_;
    const LayerTable& table_;
    const DecodeStep& step_;
    const SplitSelection& split_;
    int32_t* const products_;  // Of the query, or null.
    const Shape shape_;
    std::vector<float> scaled_;
    std::unique_ptr<int32_t[]> aligned_;
    std::unique_ptr<uint8_t[]> invalid_;
    std::vector<uint64_t> rows_, codes_;
    std::vector<int32_t> own_aligned_;
    std::vector<uint8_t> own_invalid_;
};

// Where the tables have key codes of all coded tokens, or somebody else has weighed them.
bool are_weighed(const LayerTable& table, const DecodeStep& step, const SplitSelection& split) {
    const SelectedSets& coded = *split.coded;
    const int64_t base = (table.segment_count - 1) * step.shape.segment_tokens;
    return split.aligned || !coded.count || coded.positions[coded.count - 1] < base + table.coded;
}

void offer(const CodeSlots& slots, const SplitSelection& split) {
    std::vector<int64_t> rows(size_t(split.missing_count));
    std::vector<uint64_t> codes(size_t(split.missing_count));
    for (int64_t i = 0; i < split.missing_count; ++i) {
        rows[size_t(i)] = split.rows[split.missing[i]];
        codes[size_t(i)] = split.coded->addresses[split.missing[i]];
    }
    offer_codes(slots, rows.data(), split.numbers, codes.data(), split.missing_count);
}

// Attends and offers what came, in this order: what gives way for it was attended to. False where the
// query is not finite.
bool end_split(int32_t variant, const LayerTable& table, const CodeSlots& slots,
               const DecodeStep& step, const SplitSelection& split, float* out,
               int32_t* products = nullptr) {
    if (!SplitAttention(variant, table, step, split, products).run(out)) {
        return false;
    }
    if (split.missing_count) {
        offer(slots, split);
    }
    return true;
}

// Finds exact rows and codes, and counts nothing.
Found find_all(const LayerTable& table, const PoolTable& pool, const CodeSlots& slots,
               const DecodeStep& step, SplitSelection& split, Misses& misses) {
    SelectedSets& exact = *split.exact;
    misses.count = misses.arrived = 0;
    if (!split_sets(split, table.length) || !are_weighed(table, step, split)) {
        return kNowhere;
    }
    const Found found =
        find_selected(table, pool, step, exact.positions, exact.count, false, exact.addresses);
    const bool is_placed = find_split(table, pool, slots, step.shape.segment_tokens, misses, split);
    return is_placed ? found : kNowhere;
}

// Waits for rows that were read ahead, finds everything, codes what is here, and where that and codes on
// their way are all ends the step; kCold where rows are to be read.
int32_t attend_split(int32_t variant, const LayerTable& table, const PoolTable& pool,
                     const CodeSlots& slots, const DecodeStep& step, SplitSelection& split,
                     Misses& misses, float* out, int32_t* products = nullptr) {
    SelectedSets& exact = *split.exact;
    if (split.coming) {
        split.coming->taken = 0;
    }
    if (!have_arrived(misses)) {
        split.cold_count = 0;
        return kCold;
    }
    const Found found = find_all(table, pool, slots, step, split, misses);
    if (found == kNowhere) {
        return kMisplaced;
    }
    if (step.fade_shift >= 0) {
        tally(table, step, exact.positions, exact.count);
    }
    if (found == kSomeCold) {
        list_misses(table, exact.positions, exact.count, exact.addresses, misses);
    }
    want_codes(slots, split.rows, split.settled_count);
    code_here(*scoring_kernels(variant), table, step, split);
    if (misses.count > misses.arrived || (split.cold_count && !take_coming(split))) {
        return kCold;
    }
    return end_split(variant, table, slots, step, split, out, products) ? kDone : kNotFinite;
}

// Chooses sets and which of them are exact; false where the query is not finite.
bool choose_sets(int32_t variant, LayerTable& table, DecodeStep& step, SplitSelection& split,
                 int32_t* products = nullptr) {
    const bool finite = choose_tokens(*scoring_kernels(variant), table, step, split.sets,
                                      split.exact->sets, products);
    split.set_rows = step.count;
    split.exact->set_rows = step.exact;
    split.cold_count = 0;
    return finite;
}

// Lands rows and says where each lies; kCold where one did not come as it was written.
template <class Take>
int32_t land_all(const ReadWay* way, Landing* landing, const Take& take) {
    if (!landing) {
        return kDone;
    }
    const int32_t outcome = land(*way, *landing);
    if (outcome != kDone || landing->landed < landing->count || landing->wrong >= 0) {
        return outcome != kDone ? outcome : kCold;
    }
    for (int64_t i = 0; i < landing->count; ++i) {
        const uint8_t* const row = landing->out + landing->places[i] * landing->row_bytes;
        take(i, uint64_t(reinterpret_cast<uintptr_t>(row)));
    }
    return kDone;
}

int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Brings what is to be read, in an order in which codes come while rows do.
int32_t bring(int32_t variant, const DecodeStep& step, SplitSelection& split,
              SplitLanding& landing) {
    landing.begun_ns = now();
    int32_t outcome = land_all(landing.way, landing.exact, [&](int64_t i, uint64_t row) {
        split.exact->addresses[landing.numbers[i]] = row;
    });
    if (outcome != kDone) {
        return outcome;
    }
    landing.exact_ns = now();
    RowCoder coder(*scoring_kernels(variant), step, split);
    outcome = land_all(landing.way, landing.coded, [&](int64_t i, uint64_t row) {
        coder.code(row, split.cold_positions[i],
                   split.arrived + split.cold_numbers[i] * split.row_bytes);
    });
    landing.coded_ns = now();
    if (outcome != kDone || !landing.codes) {
        return outcome;
    }
    ComingCodes& codes = *landing.codes;
    if (!arrive(*codes.awaited)) {
        return kCold;
    }
    for (int64_t i = 0; i < codes.count; ++i) {
        split.coded->addresses[split.missing[landing.filed[i]]] =
            uint64_t(reinterpret_cast<uintptr_t>(codes.records + i * codes.record_bytes));
    }
    codes.taken = codes.count;
    return kDone;
}

// --- Several sequences that take a step together ---

// Chooses for a row.
void choose_row(StepRow& own, const StepRows& asked) {
    SplitSelection& split = *own.split;
    ask(own.step, asked.query, own.row);
    bool finite = true;
    own.outcome = guarded([&] {
        LayerTable& table = own.tables[asked.layer];
        finite = choose_of(own, table, asked, split.sets, split.exact->sets);
        split.set_rows = own.step.count;
        split.exact->set_rows = own.step.exact;
    });
    if (own.outcome == kDone && !finite) {
        own.outcome = kNotFinite;
    }
}

// Finds what a row has chosen, and counts it where nothing is to be read. One row after the other: pools
// are shared.
void count_row(StepRow& own, const StepRows& asked, const PoolTable& pool, const CodeSlots& slots) {
    const LayerTable& table = own.tables[asked.layer];
    SplitSelection& split = *own.split;
    const SelectedSets& exact = *split.exact;
    const Found found = find_all(table, pool, slots, own.step, split, *own.misses);
    if (found == kNowhere || found == kSomeCold || split.cold_count) {
        own.outcome = found == kNowhere ? kMisplaced : kCold;
        return;
    }
    if (own.step.fade_shift >= 0) {
        tally(table, own.step, exact.positions, exact.count);
    }
    want_codes(slots, split.rows, split.settled_count);
}

void attend_row(StepRow& own, const StepRows& asked) {
    const LayerTable& table = own.tables[asked.layer];
    const DecodeStep& step = own.step;
    const int64_t numbers = int64_t(step.shape.kv_heads) * step.group_size * step.shape.head_dim;
    bool finite = true;
    own.outcome = guarded([&] {
        code_here(*scoring_kernels(asked.variant), table, step, *own.split);
        finite = SplitAttention(asked.variant, table, step, *own.split)
                     .run(asked.out + own.row * numbers);
    });
    if (own.outcome == kDone && !finite) {
        own.outcome = kNotFinite;
    }
}

}  // namespace
}  // namespace hillinfer

using namespace hillinfer;

// Chooses sets and says what of them is exact; where pools are given, lists what is to be read: kCold
// where that is something.
HILLINFER_API int32_t hillinfer_choose_split(int32_t variant, LayerTable* table,
                                             const PoolTable* pool, const CodeSlots* slots,
                                             DecodeStep* step, SplitSelection* split) {
    bool finite = true, is_placed = true;
    const int32_t outcome = guarded([&] {
        finite = choose_sets(variant, *table, *step, *split);
        if (finite && pool) {
            // When attention looks, the tail holds what it holds now, or what follows a full group.
            is_placed = split_sets(*split, table->length + step->coming) &&
                        list_cold(*table, *pool, *slots, step->shape.segment_tokens,
                                  table->length / kGroupTokens * kGroupTokens, *split);
        }
    });
    if (outcome != kDone) {
        return outcome;
    }
    return !finite ? kNotFinite : !is_placed ? kMisplaced : split->cold_count ? kCold : kDone;
}

// Lists what is to be read of sets that are told, or that another thread chooses, which is waited for, of
// so many tokens of which those from `held` on are not: kCold where that is something. Any thread may ask.
HILLINFER_API int32_t hillinfer_list_cold(ChoiceAhead** ahead, const LayerTable* table,
                                          const PoolTable* pool, const CodeSlots* slots,
                                          int32_t segment_tokens, int64_t length, int64_t held,
                                          SplitSelection* split) {
    const int32_t chosen = ahead ? end_choice(*ahead) : kDone;
    if (chosen != kDone) {
        return chosen;
    }
    bool is_placed = true;
    const int32_t failed = guarded([&] {
        is_placed = split_sets(*split, length) &&
                    list_cold(*table, *pool, *slots, segment_tokens, held, *split);
    });
    return failed != kDone ? failed : !is_placed ? kMisplaced : split->cold_count ? kCold : kDone;
}

// Finds rows and codes of sets that are told, once those have come that were read ahead, codes what came,
// and where all is here attends and offers codes. kCold where rows are to be read: exact ones are `misses`
// then, the others those of the split; where what was read ahead did not come nothing was looked for.
HILLINFER_API int32_t hillinfer_attend_split(int32_t variant, const LayerTable* table,
                                             const PoolTable* pool, const CodeSlots* slots,
                                             const DecodeStep* step, SplitSelection* split,
                                             Misses* misses, float* out) {
    int32_t outcome = kDone;
    const int32_t failed = guarded([&] {
        outcome = attend_split(variant, *table, *pool, *slots, *step, *split, *misses, out);
    });
    return failed != kDone ? failed : outcome;
}

// Chooses and attends, one behind the other.
HILLINFER_API int32_t hillinfer_decode_split(int32_t variant, LayerTable* table,
                                             const PoolTable* pool, const CodeSlots* slots,
                                             DecodeStep* step, SplitSelection* split, Misses* misses,
                                             float* out) {
    misses->count = misses->arrived = 0;
    int32_t outcome = kDone;
    const int32_t failed = guarded([&] {
        const auto kept = room_for_products(*table, *step);
        int32_t* const products = kept ? kept->get() : nullptr;
        outcome = choose_sets(variant, *table, *step, *split, products)
                      ? attend_split(variant, *table, *pool, *slots, *step, *split, *misses, out, products)
                      : kNotFinite;
    });
    return failed != kDone ? failed : outcome;
}

// Codes values of rows that were to be read, from the first one on, which lie at some addresses now.
HILLINFER_API int32_t hillinfer_code_cold(int32_t variant, const DecodeStep* step,
                                          const SplitSelection* split, int64_t first, int64_t count,
                                          const uint64_t* rows) {
    return guarded([&] {
        RowCoder coder(*scoring_kernels(variant), *step, *split);
        for (int64_t i = 0; i < count; ++i) {
            coder.code(rows[i], split->cold_positions[first + i],
                       split->arrived + split->cold_numbers[first + i] * split->row_bytes);
        }
    });
}

// Attends and offers codes once the rest was read.
HILLINFER_API int32_t hillinfer_end_split(int32_t variant, const LayerTable* table,
                                          const CodeSlots* slots, const DecodeStep* step,
                                          const SplitSelection* split, float* out) {
    bool finite = true;
    const int32_t failed =
        guarded([&] { finite = end_split(variant, *table, *slots, *step, *split, out); });
    return failed != kDone ? failed : finite ? kDone : kNotFinite;
}

// Lands what is to be read, codes rows of coded tokens, waits for codes, attends and offers codes. kCold
// where something did not come as it was written: nothing was attended to, and all may be landed again.
HILLINFER_API int32_t hillinfer_land_split(int32_t variant, const LayerTable* table,
                                           const CodeSlots* slots, const DecodeStep* step,
                                           SplitSelection* split, SplitLanding* landing, float* out) {
    int32_t outcome = kDone;
    const int32_t failed = guarded([&] {
        outcome = bring(variant, *step, *split, *landing);
        landing->came_ns = now();
        if (outcome == kDone && !end_split(variant, *table, *slots, *step, *split, out)) {
            outcome = kNotFinite;
        }
    });
    return failed != kDone ? failed : outcome;
}

// Attends for all rows that are not left out, whose tokens are exact or coded. What became of each is its
// outcome; of one that is kCold nothing is counted: it is to be attended to by itself, with its sets.
HILLINFER_API int32_t hillinfer_attend_split_rows(const StepRows* asked, const PoolTable* pool,
                                                  const CodeSlots* slots) {
    return guarded([&] {
        for_each_row(*asked, [&](StepRow& own) { choose_row(own, *asked); });
        const auto each_chosen = [&](const auto& act) {
            for (int64_t number = 0; number < asked->count; ++number) {
                StepRow& own = asked->rows[number];
                if (!own.is_left_out && own.outcome == kDone) {
                    act(own);
                }
            }
        };
        each_chosen([&](StepRow& own) { count_row(own, *asked, *pool, *slots); });
        for_each_row(*asked, [&](StepRow& own) {
            if (own.outcome == kDone) {
                attend_row(own, *asked);
            }
        });
        // Behind all of them: what gives way for new codes was attended to.
        each_chosen([&](StepRow& own) {
            if (own.split->missing_count) {
                offer(*slots, *own.split);
            }
        });
    });
}
