// SPDX-License-Identifier: Apache-2.0
// Scores a whole sequence in one pass over its shadows (scoring contract, sections 5 to 7).
#pragma once
#include "kernels.h"

namespace hillinfer {

// Everything a call needs; Python fills it in.
struct Sequence {
    Shape shape;
    const float* scaled;  // rows * head_dim, from `scale_query`.
    const Segment* segments;
    int64_t segment_count;
    int32_t threads;
    int32_t coming;  // Tokens that N counts and that have no key yet.
};

// Query codes of all segments, one segment's behind the other's: `rows` of each.
struct CodedQueries {
    int8_t* codes;         // rows * padded_dim.
    int32_t* exponents;    // s_h.
    int32_t* corrections;  // o_h.
};

// Tokens of one segment, from a whole group on, with a query whose offsets are in its addends.
struct Piece {
    const uint8_t* shadow;  // Of the first group.
    const int8_t* codes;
    const int32_t* exponents;
    const int32_t* addends;
    int64_t position;
    int64_t tokens;
    uint32_t* tuples;  // tuples[set * stride + token]
    int64_t stride;
};

// What a launch needs before anything else is scored: query codes of all segments, and B of each
// row or A of each set. A segment without a shadow is full, holds no recent token, and its probe
// groups go on with sinks 1 to 3 where it is the first.
void sequence_start(const Kernels& kernels, const Sequence& sequence, const CodedQueries& out,
                    int32_t* offsets);

// The tuples of pieces; of the sequence only shape and threads are looked at.
void score_pieces(const Kernels& kernels, const Sequence& sequence, const Piece* pieces,
                  int64_t count);

// How many of so many threads it is worth to score a shape's tokens with.
int scoring_threads(const Kernels& kernels, const Shape& shape, int64_t tokens, int threads);

// Tuples of all N tokens, sets * N. `products`, where it is given, gets the products of each group, rows *
// 64 of them, one group behind the other.
void score_sequence(const Kernels& kernels, const Sequence& sequence, uint32_t* tuples,
                    int32_t* products = nullptr);

// L' and exponents of one segment whose shadow is here for now: per group rows * 64 of the one and
// kv_heads * 64 of the other.
void segment_log_weights(const Kernels& kernels, const Sequence& sequence, const Segment& segment,
                         int32_t* log_weights, uint8_t* exponents);

// L' of some tokens, ascending positions from the first segment's start: rows * count of it, and
// kv_heads * count of whether a key is invalid. Segments without any of them need no shadow. `products`
// are those that `score_sequence` made for the same queries; null to make them.
void aligned_tokens(const Kernels& kernels, const Sequence& sequence, const int64_t* positions,
                    int64_t count, int32_t* aligned, uint8_t* invalid,
                    int32_t* products = nullptr);

// The tuples from those of all groups of a sequence; every segment but the last one is full.
void finish_sequence(const Kernels& kernels, const Sequence& sequence, int64_t tokens,
                     const int32_t* log_weights, const uint8_t* exponents, uint32_t* tuples);

// The tuples of some groups from theirs and the sequence's offsets: `tokens` from `position` on, the
// first of a group; tuples[set * stride + token].
void finish_groups(const Kernels& kernels, const Sequence& sequence, const int32_t* offsets,
                   int64_t position, int64_t tokens, const int32_t* log_weights,
                   const uint8_t* exponents, uint32_t* tuples, int64_t stride);

}  // namespace hillinfer
