// SPDX-License-Identifier: Apache-2.0
// The NEON variant beside the portable one, on random numbers; run by test_neon_cross.py.
//
// Integers must have the same bits. Attention adds in another order, so it must be near. With the
// argument `flip` one bit of a shadow and one number of a row differ between the two, and the program
// must say so of both.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "api.h"
#include "attention.h"
#include "choice.h"
#include "coded.h"
#include "row_sums.h"

using namespace hillinfer;

extern "C" {
int32_t hillinfer_statistics(int32_t, const Sequence*, const uint16_t*, int64_t, int64_t, int64_t,
                             int64_t, int8_t*, int32_t*);
int32_t hillinfer_encode(int32_t, const Sequence*, const Segment*, const uint16_t*, int64_t, int64_t,
                         int64_t, uint8_t*, int64_t, int64_t);
int32_t hillinfer_score(int32_t, const Sequence*, uint32_t*);
int32_t hillinfer_choose(int32_t, const Sequence*, const Choice*, int64_t*);
int32_t hillinfer_encode_values(int32_t, const Sequence*, const Segment*, const uint16_t*, int64_t,
                                int64_t, int64_t, uint8_t*, int64_t, int64_t);
int32_t hillinfer_coded_attend(int32_t, const CodedAttention*, const uint64_t*, int64_t,
                               const CodedTokens*, int64_t, float*);
int32_t hillinfer_coded_blocks(int32_t, const CodedAttention*, const CodedTokens*,
                               const BlockPartials*);
int64_t hillinfer_attention_bytes(const Attention*);
void hillinfer_row_sums(const uint8_t*, int64_t, const int64_t*, int64_t, uint32_t*);
int32_t hillinfer_attention_begin(int32_t, const Attention*, void*);
int32_t hillinfer_attention_add(int32_t, const Attention*, const RowSet*, int64_t, void*);
int32_t hillinfer_attention_result(int32_t, const Attention*, const void*, float*);
}

namespace {

constexpr int32_t kBoth[] = {kPortableVariant, kNeonVariant};
constexpr int64_t kTokens = 330;
constexpr int32_t kSegmentTokens = 1024;

int failures = 0;
std::mt19937 random_bits(1);

void expect(bool holds, const char* what, const Shape& shape) {
    if (!holds) {
        ++failures;
        std::printf("%s: %d KV heads of %d queries, head_dim %d, %d bits, rule %d, scope %d\n", what,
                    shape.kv_heads, shape.heads, shape.head_dim, shape.code_bits, shape.rule,
                    shape.scope);
    }
}

uint16_t half_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t exponent = bits >> 23 & 255;
    if (exponent < 113) {
        return 0;
    }
    return uint16_t(bits >> 16 & 0x8000) | uint16_t((exponent - 112) << 10 | (bits >> 13 & 0x3FF));
}

float normal() { return std::normal_distribution<float>()(random_bits); }

std::vector<uint16_t> random_halves(size_t count) {
    std::vector<uint16_t> made(count);
    for (uint16_t& one : made) {
        one = half_bits(normal());
    }
    return made;
}

std::vector<uint16_t> random_items(int32_t stored_type, size_t count) {
    std::vector<uint16_t> made = random_halves(count);
    for (uint16_t& one : made) {
        if (stored_type == kBfloat16) {
            const float value = normal();
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            one = uint16_t(bits >> 16);
        }
    }
    return made;
}

// What one variant makes of the same keys and query.
struct Made {
    std::vector<int8_t> exponents;
    std::vector<int32_t> means;
    std::vector<uint8_t> shadow;
    std::vector<uint32_t> tuples;
    std::vector<int64_t> chosen;
};

Made make(int32_t variant, const Shape& shape, const std::vector<uint16_t>& keys,
          const std::vector<float>& query, int flipped_bit) {
    const int64_t dim = shape.head_dim;
    const int64_t token = shape.kv_heads * dim;
    Made made;
    made.exponents.resize(token);
    made.means.resize(token);
    made.shadow.resize(kSegmentTokens / kGroupTokens * shape.group_bytes());
    made.tuples.resize(shape.sets() * kTokens);
    made.chosen.resize(shape.sets() * 100);
    Sequence sequence{shape, query.data(), nullptr, 0, 2, 0};
    expect(hillinfer_statistics(variant, &sequence, keys.data(), token, dim, 1, kTokens,
                                made.exponents.data(), made.means.data()) == kDone,
           "statistics failed", shape);
    Segment segment{nullptr, made.exponents.data(), made.means.data(), nullptr, kTokens};
    expect(hillinfer_encode(variant, &sequence, &segment, keys.data(), token, dim, 1,
                            made.shadow.data(), 0, kTokens) == kDone,
           "coding failed", shape);
    // Of the first token's exponent: its score is then far above that of the others.
    made.shadow[0] ^= uint8_t(flipped_bit);
    segment.shadow = made.shadow.data();
    sequence.segments = &segment;
    sequence.segment_count = 1;
    expect(hillinfer_score(variant, &sequence, made.tuples.data()) == kDone, "scoring failed", shape);
    const Choice choice{query.data(), dim, shape.heads, 0.125f * 1.4426950408889634f, 4, 32, 100};
    expect(hillinfer_choose(variant, &sequence, &choice, made.chosen.data()) == kDone,
           "choosing failed", shape);
    return made;
}

void check_scores(const Shape& shape, float scale, int flipped_bit) {
    const auto keys = random_halves(size_t(kTokens) * shape.kv_heads * shape.head_dim);
    std::vector<float> query(size_t(shape.rows()) * shape.head_dim);
    for (float& one : query) {
        one = scale * normal();
    }
    const Made portable = make(kPortableVariant, shape, keys, query, 0);
    const Made neon = make(kNeonVariant, shape, keys, query, flipped_bit);
    expect(portable.exponents == neon.exponents && portable.means == neon.means, "statistics differ",
           shape);
    expect(portable.shadow == neon.shadow, "shadows differ", shape);
    expect(portable.tuples == neon.tuples, "scores differ", shape);
    expect(portable.chosen == neon.chosen, "selected sets differ", shape);
}

void check_attention(int32_t stored_type, int32_t kv_heads, int32_t group_size, int32_t head_dim,
                     int flipped_bit) {
    constexpr int64_t kRows = 200;
    const Attention attention{nullptr, kv_heads, group_size, head_dim, stored_type, 0.125f, 1};
    const size_t numbers = size_t(2) * kv_heads * head_dim;
    std::vector<uint16_t> memory = random_items(stored_type, kRows * numbers);
    std::vector<uint64_t> rows;
    for (int64_t row = 0; row < kRows; ++row) {
        rows.push_back(reinterpret_cast<uint64_t>(memory.data() + row * numbers));
    }
    std::vector<float> query(size_t(attention.query_heads()) * head_dim);
    for (float& one : query) {
        one = normal();
    }
    Attention call = attention;
    call.query = query.data();
    const RowSet set{rows.data(), kRows};
    std::vector<float> out[2];
    for (int32_t variant : kBoth) {
        if (variant == kNeonVariant) {
            // The sign of a value of the first head.
            memory[size_t(kv_heads) * head_dim] ^= uint16_t(flipped_bit);
        }
        std::vector<float> result(query.size());
        std::vector<uint64_t> room(hillinfer_attention_bytes(&call) / 8 + 16);
        void* state = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
        const bool done = !hillinfer_attention_begin(variant, &call, state) &&
                          !hillinfer_attention_add(variant, &call, &set, 1, state) &&
                          !hillinfer_attention_result(variant, &call, state, result.data());
        out[variant == kNeonVariant] = done ? result : std::vector<float>();
    }
    double worst = out[0].empty() || out[1].empty() ? 1 : 0;
    for (size_t i = 0; i < out[0].size() && i < out[1].size(); ++i) {
        worst = std::fmax(worst, std::fabs(double(out[0][i]) - double(out[1][i])));
    }
    if (!(worst < 1e-5)) {
        ++failures;
        std::printf("attention differs by %g: type %d, %d heads of %d, head_dim %d\n", worst,
                    stored_type, kv_heads, group_size, head_dim);
    }
}

}  // namespace

// What one variant makes of the same rows, values and L'.
struct Coded {
    std::vector<uint8_t> shadow;
    std::vector<float> out;
    std::vector<int32_t> powers;
    std::vector<int64_t> totals;
    std::vector<float> outputs;
    std::vector<uint8_t> broken;
};

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

// Unlike plain attention this has prescribed bits.
void check_coded(int32_t stored_type, int32_t kv_heads, int32_t group_size, int32_t head_dim,
                 bool flip) {
    constexpr int64_t kRows = 70, kCoded = 200;
    const Shape shape{kv_heads, group_size, head_dim, head_dim, 4, kWeightSum, kLayer, kSegmentTokens};
    const size_t channels = size_t(kv_heads) * head_dim, heads = size_t(kv_heads) * group_size;
    const std::vector<uint16_t> memory = random_items(stored_type, kRows * 2 * channels);
    const std::vector<uint16_t> values = random_halves(kCoded * channels);
    std::vector<uint64_t> rows;
    for (int64_t row = 0; row < kRows; ++row) {
        rows.push_back(reinterpret_cast<uint64_t>(memory.data() + row * 2 * channels));
    }
    std::vector<float> query(heads * head_dim);
    for (float& one : query) {
        one = 0.3f * normal();
    }
    std::vector<int32_t> aligned(heads * kCoded);
    for (int32_t& one : aligned) {
        one = int32_t(1500 * normal());
    }
    for (size_t head = 0; head < heads; ++head) {
        // What is flipped must weigh something.
        aligned[head * kCoded] = 2500;
    }
    std::vector<int8_t> exponents(channels);
    std::vector<int32_t> means(channels);
    for (size_t i = 0; i < channels; ++i) {
        exponents[i] = int8_t(int(random_bits() % 5) - 2);
        means[i] = int32_t(random_bits() % 8192) - 4096;
    }
    const CodedAttention call{query.data(), kv_heads, group_size, head_dim, stored_type, 0, kv_heads, 2};
    Coded made[2];
    for (int32_t variant : kBoth) {
        Coded& own = made[variant == kNeonVariant];
        own.shadow.resize(kSegmentTokens / kGroupTokens * shape.value_group_bytes());
        const Sequence sequence{shape, nullptr, nullptr, 0, 2, 0};
        const Segment segment{nullptr, exponents.data(), means.data(), nullptr, kCoded};
        expect(hillinfer_encode_values(variant, &sequence, &segment, values.data(), channels, head_dim, 1,
                                       own.shadow.data(), 0, kCoded) == kDone,
               "coding of values failed", shape);
        if (flip && variant == kNeonVariant) {
            own.shadow[kv_heads * kBeatBytes] ^= 0x07;
        }
        std::vector<uint64_t> codes, beside;
        for (int64_t token = 0; token < kCoded; ++token) {
            const uint8_t* group = own.shadow.data() + token / kGroupTokens * shape.value_group_bytes();
            const uint8_t* code = group + kv_heads * kBeatBytes +
                                  token % kGroupTokens * shape.code_row_bytes();
            codes.push_back(reinterpret_cast<uint64_t>(code));
            beside.push_back(reinterpret_cast<uint64_t>(group + token % kGroupTokens));
        }
        const CodedTokens tokens{aligned.data(), nullptr, codes.data(), beside.data(), kBeatBytes,
                                 exponents.data(), means.data(), kCoded, kCoded};
        own.out.resize(heads * head_dim);
        const size_t blocks = (kCoded + kBlockTokens - 1) / kBlockTokens;
        own.powers.resize(blocks * heads);
        own.totals.resize(blocks * heads);
        own.outputs.resize(blocks * heads * head_dim);
        own.broken.resize(blocks * heads);
        const BlockPartials partials{own.powers.data(), own.totals.data(), own.outputs.data(),
                                     own.broken.data()};
        expect(hillinfer_coded_attend(variant, &call, rows.data(), kRows, &tokens, 1, own.out.data()) ==
                       kDone &&
                   hillinfer_coded_blocks(variant, &call, &tokens, &partials) == kDone,
               "coded attention failed", shape);
    }
    expect(same_bytes(made[0].shadow, made[1].shadow), "value shadows differ", shape);
    expect(same_bytes(made[0].out, made[1].out), "coded attention differs", shape);
    expect(same_bytes(made[0].powers, made[1].powers) && same_bytes(made[0].totals, made[1].totals) &&
               same_bytes(made[0].outputs, made[1].outputs) && same_bytes(made[0].broken, made[1].broken),
           "coded blocks differ", shape);
}

// The sum of a row as row_sums.h says, one word after another.
uint32_t plain_sum(const uint8_t* row, int64_t row_bytes) {
    constexpr uint64_t kStep = 0x9E3779B97F4A7C15u, kMix = 0xC2B2AE3D27D4EB4Fu;
    uint64_t lanes[8], plain[8], keys[8];
    for (int lane = 0; lane < 8; ++lane) {
        lanes[lane] = plain[lane] = keys[lane] = kMix * uint64_t(2 * lane + 1);
    }
    for (int64_t at = 0; at < row_bytes; at += 8) {
        const int lane = int(at / 8 % 8);
        uint64_t word;
        std::memcpy(&word, row + at, sizeof word);
        const uint64_t keyed = word ^ keys[lane];
        lanes[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        plain[lane] += word;
        keys[lane] += kStep;
    }
    uint64_t sum = 0;
    for (int pair = 0; pair < 8; pair += 2) {
        for (uint64_t lane : {lanes[pair], lanes[pair + 1], plain[pair], plain[pair + 1]}) {
            sum = (sum ^ lane) * kMix;
            sum ^= sum >> 29;
        }
    }
    return uint32_t(sum * kStep >> 32);
}

void check_row_sums(int64_t row_bytes, bool flip) {
    std::vector<uint8_t> rows(5 * row_bytes);
    for (uint8_t& byte : rows) {
        byte = uint8_t(random_bits());
    }
    const int64_t places[] = {3, 0, 4};
    uint32_t sums[3];
    hillinfer_row_sums(rows.data(), row_bytes, places, 3, sums);
    rows[0] ^= flip;
    for (int i = 0; i < 3; ++i) {
        if (sums[i] != plain_sum(&rows[places[i] * row_bytes], row_bytes)) {
            ++failures;
            std::printf("sums of rows differ: %d bytes\n", int(row_bytes));
        }
    }
}

int main(int count, char** arguments) {
    const bool flip = count > 1 && std::string(arguments[1]) == "flip";
    if (!hillinfer_has_variant(kNeonVariant)) {
        std::puts("no NEON variant");
        return 2;
    }
    const int32_t shapes[][3] = {{3, 3, 64}, {1, 7, 80}, {2, 4, 128}, {4, 1, 96}};
    int cases = 0;
    int attentions = 0;
    for (const auto& [kv_heads, heads, dim] : shapes) {
        for (int32_t bits : {8, 4, 2}) {
            for (int32_t rule : {kWeightSum, kRawSum}) {
                for (int32_t scope : {kLayer, kKvHead}) {
                    // Numbers from 2^10 on take the long way; every two of the three choices meet.
                    const float scale = (rule == kRawSum) != (scope == kKvHead) ? 4096.0f : 1.0f;
                    const Shape shape{kv_heads, heads, dim, dim, bits, rule, scope, kSegmentTokens};
                    check_scores(shape, scale, flip && !cases ? 0x10 : 0);
                    ++cases;
                }
            }
        }
        for (int32_t type : {kBfloat16, kFloat16}) {
            check_attention(type, kv_heads, heads, dim, flip && !attentions ? 0x8000 : 0);
            check_coded(type, kv_heads, heads, dim, flip && !attentions);
            attentions += 2;
        }
        // What differs is in the first one.
        if (flip) break;
    }
    for (int64_t row_bytes : {64, 768, 4160}) {
        check_row_sums(row_bytes, flip);
        ++cases;
    }
    std::printf("%d cases, %d differences\n", cases + attentions, failures);
    return failures ? 1 : 0;
}
