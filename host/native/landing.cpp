// SPDX-License-Identifier: Apache-2.0
#include "landing.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <optional>

#include "read_plan.h"
#include "row_sums.h"
#include "shape.h"

namespace hillinfer {
namespace {

const PageSeal& seal_of(const Landing& landing, int64_t row) {
    return landing.seals[landing.seals_groups ? row / kGroupTokens : 0];
}

// Runs are copied out as their reads come, while others are under way, by whichever thread has them.
class Batch final : public Arrivals {
public:
    Batch(const Landing& landing, const std::vector<WantedRow>& sorted, const ReadPlan& plan,
          AttendingRun* attending)
        : landing_(landing), sorted_(sorted), plan_(plan), attending_(attending),
          coming_(plan.runs.size()), wrong_(landing.wrong) {
        for (const int64_t run : plan.run_of_read) {
            coming_[size_t(run)].fetch_add(1, std::memory_order_relaxed);
        }
    }

    void came(int64_t read) noexcept override {
        if (landing_.seals) {
            open(read);
        }
        const int64_t run = plan_.run_of_read[size_t(read)];
        if (coming_[size_t(run)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(plan_.runs[size_t(run)]);
        }
    }

    bool has_work() const override { return attending_; }

    void meanwhile() noexcept override {
        if (attending_) {
            try {
                attending_->advance();
            } catch (const std::bad_alloc&) {
                // Nothing was done yet: it is once all is here, or the lack is told then.
            }
        }
    }

    // After others have read what had not come, in the order of reads.
    void finish_all(int64_t missing) {
        if (landing_.seals) {
            // Pages of the other reads are open.
            int64_t next = 0;
            for (size_t read = 0; read < plan_.addresses.size() && next < missing; ++read) {
                if (plan_.addresses[read] == landing_.missing_addresses[next]) {
                    open(int64_t(read));
                    ++next;
                }
            }
        }
        for (const Run& run : plan_.runs) {
            finish(run);
        }
    }

    int64_t wrong() const { return wrong_; }

private:
    void finish(const Run& run) {
        const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(run.address);
        for (int64_t i = run.first; i < run.stop; ++i) {
            const WantedRow& wanted = sorted_[size_t(i)];
            const int64_t place = landing_.places[wanted.index];
            uint8_t* const row = landing_.out + place * landing_.row_bytes;
            if (landing_.buffer) {
                std::memcpy(row, bytes + wanted.offset - run.file_offset,
                            size_t(landing_.row_bytes));
            }
            if (landing_.sums) {
                uint32_t sum;
                row_sums(landing_.out, landing_.row_bytes, &place, 1, &sum);
                if (sum != landing_.sums[wanted.row]) {
                    note_wrong(wanted.index);
                }
            }
            if (attending_) {
                attending_->here(landing_.numbers[wanted.index], row);
            }
        }
    }

    // Opens those pages of a read that wanted rows lie in: of others, which were read because they lie
    // in between, nobody knows whether they are being written. Rows whose pages do not open are wrong.
    void open(int64_t read) {
        const Run& run = plan_.runs[size_t(plan_.run_of_read[size_t(read)])];
        const int64_t begin = plan_.file_offsets[size_t(read)];
        const int64_t end = begin + plan_.byte_counts[size_t(read)];
        uint8_t* const bytes = reinterpret_cast<uint8_t*>(plan_.addresses[size_t(read)]);
        const auto stop = sorted_.begin() + run.stop;
        auto row = std::partition_point(
            sorted_.begin() + run.first, stop,
            [&](const WantedRow& one) { return one.offset + landing_.row_bytes <= begin; });
        PageOpener* const opener = openers_.take();
        // Pages of the read up to which they are open, and up to which one is not.
        int64_t opened = 0, closed = 0;
        for (; row != stop && row->offset < end; ++row) {
            const PageSeal& seal = seal_of(landing_, row->row);
            const int64_t first = (std::max(row->offset, begin) - begin) / kSealedPageBytes;
            const int64_t last = (std::min(row->offset + landing_.row_bytes, end) - 1 - begin) /
                                 kSealedPageBytes;
            const int64_t before = (begin - seal.origin) / kSealedPageBytes;
            for (int64_t page = std::max(first, opened); page <= last; ++page) {
                opened = page + 1;
                if (!opener || !opener->open(seal, before + page, bytes + page * kSealedPageBytes)) {
                    closed = page + 1;
                }
            }
            if (closed > first) {
                note_wrong(row->index);
            }
        }
        if (opener) {
            openers_.give(opener);
        }
    }

    void note_wrong(int64_t index) {
        int64_t known = wrong_;
        while ((known < 0 || index < known) && !wrong_.compare_exchange_weak(known, index)) {
        }
    }

    const Landing& landing_;
    const std::vector<WantedRow>& sorted_;
    const ReadPlan& plan_;
    AttendingRun* const attending_;
    // Reads of each run that have not come.
    std::vector<std::atomic<int32_t>> coming_;
    std::atomic<int64_t> wrong_;
    PageOpeners openers_;
};

int64_t unit_of(const Landing& landing) {
    return landing.seals ? std::max(landing.unit_bytes, kSealedPageBytes) : landing.unit_bytes;
}

bool is_sealed_there(const Landing& landing, int64_t row) {
    if (landing.seals_groups && row / kGroupTokens >= landing.seal_count) {
        return false;
    }
    const PageSeal& seal = seal_of(landing, row);
    const int64_t offset = row_offset(row, landing.row_bytes, landing.starts) - seal.origin;
    return seal.key && offset >= 0 && offset + landing.row_bytes <= seal.count * kSealedPageBytes;
}

// Of a batch of rows that go to their places, where it is to give way behind it: ten milliseconds of a
// slow drive, and hundreds of reads in flight.
int64_t giving_way_rows(const Landing& landing) {
    constexpr int64_t kBytes = 4 << 20;
    return std::max<int64_t>(1, kBytes / landing.row_bytes);
}

bool is_placed(const Landing& landing) {
    if (landing.unit_bytes < 1) {
        return false;
    }
    for (int64_t i = 0; i < landing.count; ++i) {
        const int64_t row = landing.rows[i], place = landing.places[i];
        if (row < 0 || place < 0 || place >= landing.out_rows ||
            (landing.starts && row / kGroupTokens >= landing.start_count) ||
            (landing.sums && row >= landing.sum_count) ||
            (landing.seals && !is_sealed_there(landing, row))) {
            return false;
        }
    }
    return true;
}

void note_missing(const FileReads& reads, Landing& landing) {
    for (int64_t i = 0; i < reads.count; ++i) {
        if (reads.results[i] != reads.byte_counts[i]) {
            const int64_t at = landing.missing++;
            landing.missing_offsets[at] = reads.file_offsets[i];
            landing.missing_addresses[at] = reads.addresses[i];
            landing.missing_counts[at] = reads.byte_counts[i];
        }
    }
}

}  // namespace

Outcome land(const ReadWay& way, Landing& landing, const std::atomic<bool>* gives_way) {
    if (!is_placed(landing)) {
        return kMisplaced;
    }
    const int64_t missing = landing.missing;
    landing.missing = 0;
    const std::vector<WantedRow> sorted = in_file_order(
        landing.rows, landing.count, landing.row_bytes, landing.starts);
    ReadPlan plan;
    std::vector<int64_t> results;
    std::optional<AttendingRun> attending;
    if (landing.attending) {
        attending.emplace(*landing.attending);
    }
    while (landing.landed < landing.count) {
        int64_t next = landing.count;
        if (landing.buffer) {
            next = plan_batch(sorted, landing.landed, landing.row_bytes, unit_of(landing),
                              landing.buffer, landing.buffer_bytes, plan);
        } else {
            next = gives_way ? std::min(next, landing.landed + giving_way_rows(landing)) : next;
            plan_in_place(sorted, landing.landed, next, landing.places, landing.row_bytes, landing.out,
                          plan);
        }
        Batch batch(landing, sorted, plan, attending ? &*attending : nullptr);
        if (landing.is_read) {
            batch.finish_all(missing);
        } else {
            results.resize(plan.file_offsets.size());
            const FileReads reads{int64_t(results.size()), plan.file_offsets.data(),
                                  plan.addresses.data(), plan.byte_counts.data(), results.data()};
            if (!read_file(way, reads, &batch)) {
                return kLost;
            }
            landing.reads += reads.count;
            for (const int64_t count : plan.byte_counts) {
                landing.byte_count += count;
            }
            note_missing(reads, landing);
        }
        landing.wrong = batch.wrong();
        if (landing.missing) {
            return kDone;
        }
        landing.is_read = 0;
        landing.landed = next;
        if (next < landing.count && gives_way && *gives_way) {
            return kDone;
        }
    }
    if (attending) {
        attending->end();
    }
    return kDone;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_land(const hillinfer::ReadWay* way, hillinfer::Landing* landing) {
    int32_t outcome = hillinfer::kDone;
    const int32_t failed =
        hillinfer::guarded([&] { outcome = hillinfer::land(*way, *landing); });
    return failed ? failed : outcome;
}
