// SPDX-License-Identifier: Apache-2.0
#include "sequence.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "group_work.h"
#include "offsets.h"
#include "thread_pool.h"

namespace hillinfer {
namespace {

// Threads that it is worth to make tuples of so many tokens' L' with.
int finishing_threads(const Sequence& sequence, int64_t tokens) {
    const int64_t bytes = tokens * sequence.shape.rows() * int64_t(sizeof(int32_t));
    return worthwhile_threads(sequence.threads, bytes);
}

// One token's codes lie a beat apart. A constant size makes each copy one instruction; the next
// probe token's beats are about `ahead` bytes away, where no processor looks by itself.
template <size_t kBytes>
void copy_pieces(const uint8_t* from, uint8_t* to, int slices, size_t ahead) {
    for (int slice = 0; slice < slices; ++slice) {
        __builtin_prefetch(from + size_t(slice) * kBeatBytes + ahead);
        std::memcpy(to + size_t(slice) * kBeatBytes, from + size_t(slice) * kBeatBytes, kBytes);
    }
}

// Copies a token's codes and exponents from one group into another.
void copy_token(const Shape& shape, const uint8_t* from, int from_token, uint8_t* to,
                int to_token) {
    for (int head = 0; head < shape.kv_heads; ++head) {
        to[head * kGroupTokens + to_token] = from[head * kGroupTokens + from_token];
    }
    const int tile = shape.tile_tokens();
    const int piece = shape.piece_bytes();
    const size_t codes = size_t(shape.kv_heads) * kBeatBytes;
    from += codes + from_token / tile * shape.tile_bytes() + size_t(from_token % tile * piece);
    to += codes + to_token / tile * shape.tile_bytes() + size_t(to_token % tile * piece);
    const int slices = shape.kv_heads * shape.slices();
    const size_t ahead = size_t(kStride) / tile * shape.tile_bytes();
    switch (piece) {
        case 16: return copy_pieces<16>(from, to, slices, ahead);
        case 8: return copy_pieces<8>(from, to, slices, ahead);
        default: return copy_pieces<4>(from, to, slices, ahead);
    }
}

class SequenceScores {
public:
    SequenceScores(const Kernels& kernels, const Sequence& sequence)
        : kernels_(kernels),
          sequence_(sequence),
          shape_(sequence.shape),
          queries_(kernels, sequence.shape, sequence.segment_count),
          scratches_(scratches(sequence.shape, sequence.threads)),
          tokens_(total(sequence)),
          sample_(sequence.shape, tokens_, sequence.coming) {}

    void run(uint32_t* tuples, int32_t* products) {
        if (!tokens_) {
            return;
        }
        const std::vector<int32_t> offsets = this->offsets();
        const int64_t per_segment = shape_.segment_tokens / kGroupTokens;
        const int64_t groups = groups_of(tokens_);
        const int64_t step = groups_at_once(groups, sequence_.threads);
        run_parallel(sequence_.threads, (groups + step - 1) / step,
                     [&](int64_t item, int worker) {
                         const int64_t stop = std::min((item + 1) * step, groups);
                         for (int64_t group = item * step, next; group < stop; group = next) {
                             const int64_t number = group / per_segment;
                             next = std::min((number + 1) * per_segment, stop);
                             score(number, group, next, offsets.data(), tuples, products,
                                   scratches_[worker]);
                         }
                     });
    }

    std::vector<int32_t> offsets() {
        run_parallel(sequence_.threads, sequence_.segment_count,
                     [&](int64_t number, int worker) {
                         sample(number, scratches_[worker].codes.get(), scratches_[worker]);
                     });
        return sequence_offsets(kernels_, shape_, sample_, sequence_.threads);
    }

    // The same, with the query codes that are made for it.
    std::vector<int32_t> offsets(const CodedQueries& out) {
        const size_t rows = size_t(shape_.rows());
        run_parallel(sequence_.threads, sequence_.segment_count,
                     [&](int64_t number, int worker) {
                         sample(number, out.codes + size_t(number) * rows * shape_.padded_dim,
                                scratches_[worker]);
                         const QueryCodes made = queries_.codes_of(number);
                         std::copy_n(made.exponents, rows, out.exponents + size_t(number) * rows);
                         std::copy_n(made.corrections, rows,
                                     out.corrections + size_t(number) * rows);
                     });
        return sequence_offsets(kernels_, shape_, sample_, sequence_.threads);
    }

private:
    static int64_t total(const Sequence& sequence) {
        int64_t tokens = 0;
        for (int64_t i = 0; i < sequence.segment_count; ++i) {
            tokens += sequence.segments[i].tokens;
        }
        return tokens;
    }

    const uint8_t* group_of(int64_t number, int64_t group) const {
        return sequence_.segments[number].shadow + size_t(group) * shape_.group_bytes();
    }

    // Codes a segment's query, rows * padded_dim, and takes L' of its offset tokens.
    void sample(int64_t number, int8_t* codes, Scratch& scratch) {
        const Segment& segment = sequence_.segments[number];
        queries_.code(sequence_.scaled, segment, number, codes);
        const int64_t base = number * shape_.segment_tokens;
        for (int64_t first = 0; first < segment.tokens; first += kStride * kGroupTokens) {
            sample_probes(number, base, first, scratch);
        }
        if (!segment.shadow) {
            // Somebody else has it, and no recent token: the probe groups hold the sinks.
            for (int64_t sink = 0; number == 0 && sink < sample_.where.sinks; ++sink) {
                const int64_t probes = (shape_.segment_tokens + kStride - 1) / kStride;
                const int64_t place = sink ? probes + sink - 1 : 0;
                const uint8_t* group =
                    segment.probes + size_t(place / kGroupTokens) * shape_.group_bytes();
                weigh(number, group, scratch);
                keep(group, place % kGroupTokens, place % kGroupTokens + 1, sink, scratch);
            }
            return;
        }
        for (int64_t group = 0; group < groups_of(segment.tokens); ++group) {
            const int64_t start = base + group * kGroupTokens;
            if (start < sample_.where.sinks || start + kGroupTokens > sample_.where.recent) {
                const int64_t count =
                    std::min<int64_t>(segment.tokens - group * kGroupTokens, kGroupTokens);
                const uint8_t* own = group_of(number, group);
                weigh(number, own, scratch);
                keep(own, 0, std::min(sample_.where.sinks - start, count), start, scratch);
                const int64_t recent = std::max<int64_t>(sample_.where.recent - start, 0);
                keep(own, recent, count, sample_.where.sinks + start + recent - sample_.where.recent,
                     scratch);
            }
        }
    }

    // The probe tokens among 1,024 tokens: a group of their own.
    void sample_probes(int64_t number, int64_t base, int64_t first, Scratch& scratch) {
        const Segment& segment = sequence_.segments[number];
        const int64_t start = base + first;
        const int64_t held =
            std::min<int64_t>((segment.tokens - first + kStride - 1) / kStride, kGroupTokens);
        // The others lie in R; so does position 0.
        const int64_t outside = (sample_.where.recent - start + kStride - 1) / kStride;
        const int64_t count = std::min(held, outside);
        const int64_t skipped = start == 0 ? 1 : 0;
        if (count <= skipped) {
            return;
        }
        const uint8_t* group = scratch.probes.get();
        if (segment.probes) {
            group = segment.probes + size_t(first / (kStride * kGroupTokens)) * shape_.group_bytes();
        } else {
            for (int64_t i = 0; i < count; ++i) {
                const int64_t token = first + i * kStride;
                copy_token(shape_, group_of(number, token / kGroupTokens),
                           int(token % kGroupTokens), scratch.probes.get(), int(i));
            }
        }
        weigh(number, group, scratch);
        keep(group, skipped, count,
             sample_.where.once(tokens_) + start / kStride + skipped - 1, scratch);
    }

    // Takes L' of a group.
    void weigh(int64_t number, const uint8_t* group, Scratch& scratch) {
        const QueryCodes query = queries_.codes_of(number);
        kernels_.log_weights(
            shape_,
            {group, &query, queries_.arranged_of(number), scratch.products.get(),
             scratch.row_words.get()},
            scratch.log_weights.get());
    }

    // Puts tokens first .. stop - 1 of a weighed group into the sample, from `place` on.
    void keep(const uint8_t* group, int64_t first, int64_t stop, int64_t place, Scratch& scratch) {
        if (first >= stop) {
            return;
        }
        const size_t count = size_t(stop - first);
        for (int row = 0; row < shape_.rows(); ++row) {
            std::memcpy(sample_.log_weights.data() + size_t(row) * sample_.count + place,
                        scratch.log_weights.get() + row * kGroupTokens + first,
                        count * sizeof(int32_t));
        }
        for (int head = 0; head < shape_.kv_heads; ++head) {
            uint8_t* marks = sample_.invalid.data() + size_t(head) * sample_.count + place;
            for (size_t i = 0; i < count; ++i) {
                marks[i] = group[head * kGroupTokens + first + int64_t(i)] == kInvalidExponent;
            }
        }
    }

    // Groups first .. stop - 1 of the sequence, all of one segment.
    void score(int64_t number, int64_t first, int64_t stop, const int32_t* offsets,
               uint32_t* tuples, int32_t* products, Scratch& scratch) {
        const QueryCodes query = queries_.codes_of(number);
        const int64_t of_group = int64_t(shape_.rows()) * kGroupTokens;
        const int64_t position = first * kGroupTokens;
        const int64_t own = first - number * (shape_.segment_tokens / kGroupTokens);
        kernels_.tuples(shape_,
                        {group_of(number, own), &query, queries_.arranged_of(number),
                         products ? products + first * of_group : scratch.products.get(),
                         scratch.row_words.get(), products ? of_group : 0},
                        offsets, position, std::min(tokens_, stop * kGroupTokens) - position,
                        tuples + position, tokens_);
    }

    const Kernels& kernels_;
    const Sequence& sequence_;
    const Shape& shape_;
    Queries queries_;
    std::vector<Scratch> scratches_;
    int64_t tokens_;
    OffsetSample sample_;
};

}  // namespace

int scoring_threads(const Kernels& kernels, const Shape& shape, int64_t tokens, int threads) {
    // Without vectors a byte takes more than ten times as long.
    const int64_t slower = &kernels == &kPortable ? 16 : 1;
    return worthwhile_threads(threads, slower * shape.work_bytes(tokens));
}

void score_sequence(const Kernels& kernels, const Sequence& sequence, uint32_t* tuples,
                    int32_t* products) {
    SequenceScores(kernels, sequence).run(tuples, products);
}

void sequence_start(const Kernels& kernels, const Sequence& sequence, const CodedQueries& out,
                    int32_t* offsets) {
    const std::vector<int32_t> made = SequenceScores(kernels, sequence).offsets(out);
    std::copy(made.begin(), made.end(), offsets);
}

void score_pieces(const Kernels& kernels, const Sequence& sequence, const Piece* pieces,
                  int64_t count) {
    const Shape& shape = sequence.shape;
    const size_t rows = size_t(shape.rows());
    const size_t arranged_bytes = (kernels.arranged_bytes(shape) + 63) / 64 * 64;
    Aligned<int8_t> arranged(size_t(count) * arranged_bytes);
    std::vector<int32_t> sums(size_t(count) * rows);
    const std::vector<int32_t> none(std::max(rows, size_t(shape.sets())));
    std::vector<Scratch> own = scratches(shape, sequence.threads);
    // Of every piece so many groups at a time.
    std::vector<int64_t> first_item(size_t(count) + 1);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t groups = groups_of(pieces[i].tokens);
        first_item[i + 1] = first_item[i] + (groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
    }
    run_parallel(sequence.threads, count, [&](int64_t number, int) {
        const int8_t* codes = pieces[number].codes;
        kernels.arrange(shape, codes, arranged.get() + size_t(number) * arranged_bytes);
        for (size_t row = 0; row < rows; ++row) {
            int32_t sum = 0;
            for (int i = 0; i < shape.padded_dim; ++i) {
                sum += codes[row * shape.padded_dim + i];
            }
            sums[number * rows + row] = sum;
        }
    });
    run_parallel(sequence.threads, first_item[count], [&](int64_t item, int worker) {
        const int64_t number =
            std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
        const Piece& piece = pieces[number];
        const QueryCodes query{nullptr, const_cast<int32_t*>(piece.exponents),
                               const_cast<int32_t*>(piece.addends), &sums[number * rows]};
        const int64_t start = (item - first_item[number]) * kGroupsAtOnce;
        const int64_t token = start * kGroupTokens;
        const int64_t tokens =
            std::min<int64_t>(piece.tokens - token, kGroupsAtOnce * kGroupTokens);
        // The offsets are in the addends already.
        kernels.tuples(shape,
                       {piece.shadow + size_t(start) * shape.group_bytes(), &query,
                        arranged.get() + size_t(number) * arranged_bytes,
                        own[worker].products.get(), own[worker].row_words.get()},
                       none.data(), piece.position + token, tokens, piece.tuples + token,
                       piece.stride);
    });
}

void segment_log_weights(const Kernels& kernels, const Sequence& sequence, const Segment& segment,
                         int32_t* log_weights, uint8_t* exponents) {
    const Shape& shape = sequence.shape;
    Queries queries(kernels, shape, 1);
    std::vector<Scratch> own = scratches(shape, sequence.threads);
    queries.code(sequence.scaled, segment, 0, own[0].codes.get());
    const QueryCodes query = queries.codes_of(0);
    const int64_t groups = groups_of(segment.tokens);
    const int threads = scoring_threads(kernels, shape, segment.tokens, sequence.threads);
    run_parallel(threads, groups, [&](int64_t group, int worker) {
        const uint8_t* from = segment.shadow + size_t(group) * shape.group_bytes();
        kernels.log_weights(
            shape,
            {from, &query, queries.arranged_of(0), own[worker].products.get(),
             own[worker].row_words.get()},
            log_weights + size_t(group) * shape.rows() * kGroupTokens);
        std::memcpy(exponents + size_t(group) * shape.kv_heads * kGroupTokens, from,
                    size_t(shape.kv_heads) * kGroupTokens);
    });
}

void finish_sequence(const Kernels& kernels, const Sequence& sequence, int64_t tokens,
                     const int32_t* log_weights, const uint8_t* exponents, uint32_t* tuples) {
    const Shape& shape = sequence.shape;
    OffsetSample sample(shape, tokens, sequence.coming);
    const size_t row_tokens = size_t(shape.rows()) * kGroupTokens;
    const size_t head_tokens = size_t(shape.kv_heads) * kGroupTokens;
    for (int64_t position = 0; position < tokens; ++position) {
        const int64_t place = sample.where.place(position, tokens);
        if (place < 0) {
            continue;
        }
        const size_t group = size_t(position / kGroupTokens);
        const size_t token = size_t(position % kGroupTokens);
        for (int row = 0; row < shape.rows(); ++row) {
            sample.log_weights[size_t(row) * sample.count + place] =
                log_weights[group * row_tokens + row * kGroupTokens + token];
        }
        for (int head = 0; head < shape.kv_heads; ++head) {
            sample.invalid[size_t(head) * sample.count + place] =
                exponents[group * head_tokens + head * kGroupTokens + token] == kInvalidExponent;
        }
    }
    const int threads = finishing_threads(sequence, tokens);
    const std::vector<int32_t> offsets = sequence_offsets(kernels, shape, sample, threads);
    finish_groups(kernels, sequence, offsets.data(), 0, tokens, log_weights, exponents, tuples,
                  tokens);
}

void finish_groups(const Kernels& kernels, const Sequence& sequence, const int32_t* offsets,
                   int64_t position, int64_t tokens, const int32_t* log_weights,
                   const uint8_t* exponents, uint32_t* tuples, int64_t stride) {
    const Shape& shape = sequence.shape;
    const size_t row_tokens = size_t(shape.rows()) * kGroupTokens;
    const size_t head_tokens = size_t(shape.kv_heads) * kGroupTokens;
    run_parallel(finishing_threads(sequence, tokens), groups_of(tokens), [&](int64_t group, int) {
        const int64_t first = group * kGroupTokens;
        const int count = int(std::min<int64_t>(tokens - first, kGroupTokens));
        kernels.finish(shape, log_weights + size_t(group) * row_tokens,
                       exponents + size_t(group) * head_tokens, offsets, position + first, count,
                       tuples + first, stride);
    });
}

}  // namespace hillinfer
