// SPDX-License-Identifier: Apache-2.0
// Codes of few bits for all tokens, after KIVI, and attention that reads them; see codes.py for how
// they lie.
//
// Compiled for the machine that it runs on, with the compiler's own vectors: this is the rival that
// the product is compared with, and no part of the product.
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLine = 32;  // Items of a group, which has a least value and a step.
constexpr int kHalf = kLine / 2;
constexpr int kRows = 128;  // Of the newest tokens, in ring and tail.
constexpr int kMostChannels = 256;
constexpr int kMostHeads = 8;
constexpr int64_t kParts = 8;  // Of a call's units, for as many threads as take some.

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Numbers __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

// What every call is about; codes.py has the same fields.
struct Shape {
    int32_t kv_heads, group, head_dim, bits, unit_tokens, threads;
};

// The newest tokens as float32, (kv_heads, 128, head_dim); token t lies in row t % 128.
struct Newest {
    const float* keys;
    const float* values;
    int64_t length;
};

float float_of_half(uint16_t half) {
    uint32_t magnitude = uint32_t(half & 0x7FFF) << 13;
    float wide;
    std::memcpy(&wide, &magnitude, 4);
    wide *= 5.192296858534828e33f;  // 2^112: the exponent's bias grows by as much.
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    bits |= uint32_t(half & 0x8000) << 16;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// Round to nearest, ties to even; finite numbers within half's range.
uint16_t half_of_float(float wide) {
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    float magnitude = std::fabs(wide);
    if (magnitude < 6.103515625e-05f) {
        return uint16_t(sign | uint16_t(std::nearbyint(magnitude * 16777216.0f)));
    }
    std::memcpy(&bits, &magnitude, 4);
    bits += 0xFFF + (bits >> 13 & 1);
    const uint32_t rounded = (bits >> 13) - (112u << 10);
    return uint16_t(sign | (rounded < 0x7BFF ? rounded : 0x7BFF));
}

// Where a block's parts lie: nibbles, what codes have beyond four bits, least values, steps.
struct Block {
    Block(uint8_t* start, int64_t lines, int bits)
        : nibbles(start),
          high(start + lines * kHalf),
          least(reinterpret_cast<uint16_t*>(high + (bits > 4 ? lines * (kLine / 8) : 0))),
          steps(least + lines) {}

    const uint8_t* end() const {
        return reinterpret_cast<const uint8_t*>(steps + (steps - least));
    }

    static int64_t size(int64_t lines, int bits) {
        return lines * (kHalf + (bits > 4 ? kLine / 8 : 0) + 4);
    }

    uint8_t* nibbles;
    uint8_t* high;
    uint16_t* least;
    uint16_t* steps;
};

struct Unit {
    Unit(const Shape& shape, const uint8_t* start)
        : shape_(shape), start_(const_cast<uint8_t*>(start)) {}

    // Of 32 tokens: a line for each channel.
    Block keys(int head, int group) const {
        const int64_t size = Block::size(shape_.head_dim, shape_.bits);
        const int64_t place = int64_t(head) * (shape_.unit_tokens / kLine) + group;
        return {start_ + place * size, shape_.head_dim, shape_.bits};
    }

    // Of 32 channels: a line for each token.
    Block values(int head, int group) const {
        const int64_t keys = Block::size(shape_.head_dim, shape_.bits);
        const int64_t all = int64_t(shape_.kv_heads) * (shape_.unit_tokens / kLine) * keys;
        const int64_t size = Block::size(shape_.unit_tokens, shape_.bits);
        const int64_t place = int64_t(head) * (shape_.head_dim / kLine) + group;
        return {start_ + all + place * size, shape_.unit_tokens, shape_.bits};
    }

private:
    const Shape& shape_;
    uint8_t* start_;
};

// Code lines first <= line < first + count of a block.
void encode(const Block& block, int first, int count, int bits, const float* items,
            int64_t line_stride, int64_t item_stride) {
    const float most_code = float((1 << bits) - 1);
    for (int i = 0; i < count; ++i) {
        float own[kLine];
        for (int k = 0; k < kLine; ++k) {
            own[k] = items[i * line_stride + k * item_stride];
        }
        float least = own[0], most = own[0];
        for (int k = 1; k < kLine; ++k) {
            least = own[k] < least ? own[k] : least;
            most = own[k] > most ? own[k] : most;
        }
        const int line = first + i;
        block.least[line] = half_of_float(least);
        least = float_of_half(block.least[line]);
        const uint16_t half_step = half_of_float((most - least) / most_code);
        float step = float_of_half(half_step);
        block.steps[line] = half_step;
        step = step > 1e-7f ? step : 1e-7f;
        uint8_t codes[kLine];
        for (int k = 0; k < kLine; ++k) {
            float code = __builtin_nearbyintf((own[k] - least) / step);
            code = code < 0.0f ? 0.0f : code > most_code ? most_code : code;
            codes[k] = uint8_t(int(code));
        }
        for (int k = 0; k < kHalf; ++k) {
            block.nibbles[line * kHalf + k] =
                uint8_t((codes[k] & 15) | (codes[k + kHalf] & 15) << 4);
        }
        if (bits > 4) {
            uint32_t plane = 0;
            for (int k = 0; k < kLine; ++k) {
                plane |= uint32_t(codes[k] >> 4) << k;
            }
            std::memcpy(block.high + line * 4, &plane, 4);
        }
    }
}

// The 32 codes of a line as floats.
template <bool kHigh>
inline void widen(const Block& block, int line, Floats& low, Floats& high) {
    const uint8_t* const from = block.nibbles + line * kHalf;
#if defined(__AVX512F__)
    // A permutation looks at as many bits of a number as it needs.
    const __m512 small = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i first =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i second = _mm512_srli_epi32(first, 4);
    __m512 one = _mm512_permutexvar_ps(first, small);
    __m512 two = _mm512_permutexvar_ps(second, small);
    if (kHigh) {
        uint32_t plane;
        std::memcpy(&plane, block.high + line * 4, 4);
        const __m512 sixteen = _mm512_set1_ps(16.0f);
        one = _mm512_mask_add_ps(one, __mmask16(plane), one, sixteen);
        two = _mm512_mask_add_ps(two, __mmask16(plane >> 16), two, sixteen);
    }
    low = Floats(one);
    high = Floats(two);
#else
    Bytes raw;
    std::memcpy(&raw, from, sizeof raw);
    Numbers first = __builtin_convertvector(raw & 15, Numbers);
    Numbers second = __builtin_convertvector(raw >> 4, Numbers);
    if (kHigh) {
        int32_t plane;
        std::memcpy(&plane, block.high + line * 4, 4);
        const Numbers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Numbers planes = Numbers{} + plane;
        first |= (planes >> lanes & 1) << 4;
        second |= (planes >> (lanes + 16) & 1) << 4;
    }
    low = __builtin_convertvector(first, Floats);
    high = __builtin_convertvector(second, Floats);
#endif
}

// Adds lines, each by a factor of each head: factors[head * stride + line].
template <int kHeads, bool kHigh>
inline void add_lines(const Block& block, int lines, const float* factors, int64_t stride,
                      Floats (*sums)[2]) {
    // So many sums at once that none waits for the one before it.
    constexpr int kTurns = kHeads == 1 ? 4 : kHeads == 2 ? 2 : 1;
    Floats own[kTurns][kHeads][2] = {};
    int line = 0;
    // The next block, which most often lies behind this one.
    for (const uint8_t* at = block.high; at < block.end(); at += 64) {
        __builtin_prefetch(at + (block.end() - block.nibbles));
    }
    for (; line + kTurns <= lines; line += kTurns) {
        if (line % 4 == 0) {
            __builtin_prefetch(block.end() + line * kHalf);
        }
#pragma GCC unroll 4
        for (int turn = 0; turn < kTurns; ++turn) {
            Floats low, high;
            widen<kHigh>(block, line + turn, low, high);
#pragma GCC unroll 8
            for (int head = 0; head < kHeads; ++head) {
                const float factor = factors[head * stride + line + turn];
                own[turn][head][0] += low * factor;
                own[turn][head][1] += high * factor;
            }
        }
    }
    for (; line < lines; ++line) {
        Floats low, high;
        widen<kHigh>(block, line, low, high);
#pragma GCC unroll 8
        for (int head = 0; head < kHeads; ++head) {
            own[0][head][0] += low * factors[head * stride + line];
            own[0][head][1] += high * factors[head * stride + line];
        }
    }
#pragma GCC unroll 4
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 8
        for (int head = 0; head < kHeads; ++head) {
            sums[head][0] += own[turn][head][0];
            sums[head][1] += own[turn][head][1];
        }
    }
}

inline Floats loaded(const float* from) {
    Floats own;
    std::memcpy(&own, from, sizeof own);
    return own;
}

inline void stored(float* to, Floats own) { std::memcpy(to, &own, sizeof own); }

// e^x for x <= 0, in place. Less than e^-60 is nothing beside 1, and as a factor of steps it would
// give subnormal numbers, which take a processor a hundred times as long.
void exponentials(float* items, int count) {
    constexpr float kLeast = -60.0f;
    for (int i = 0; i < count; ++i) {
        const float x = items[i] < kLeast ? kLeast : items[i];
        const float shifted = x * 1.44269504088896341f + 12582912.0f;
        const float power = shifted - 12582912.0f;
        float rest = power * -0.693359375f + x;
        rest = power * 2.12194440e-4f + rest;
        float sum = 1.9875691500e-4f;
        sum = sum * rest + 1.3981999507e-3f;
        sum = sum * rest + 8.3334519073e-3f;
        sum = sum * rest + 4.1665795894e-2f;
        sum = sum * rest + 1.6666665459e-1f;
        sum = sum * rest + 5.0000001201e-1f;
        sum = sum * (rest * rest) + rest + 1.0f;
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        bits <<= 23;
        uint32_t own;
        std::memcpy(&own, &sum, 4);
        own += bits;
        std::memcpy(&sum, &own, 4);
        items[i] = items[i] < kLeast ? 0.0f : sum;
    }
}

// Softmax of one query head so far: largest score, sum of weights, weighted values.
struct Sums {
    float* largest;
    float* sum;
    float* values;

    static int64_t size(const Shape& shape) { return 2 + shape.head_dim; }

    Sums(const Shape& shape, float* state, int head)
        : largest(state + head * size(shape)), sum(largest + 1), values(largest + 2) {}
};

void clear(const Shape& shape, float* state) {
    for (int head = 0; head < shape.kv_heads * shape.group; ++head) {
        const Sums own(shape, state, head);
        *own.largest = -std::numeric_limits<float>::infinity();
        std::memset(own.sum, 0, size_t(1 + shape.head_dim) * sizeof(float));
    }
}

void add(const Shape& shape, float* state, const float* other) {
    for (int head = 0; head < shape.kv_heads * shape.group; ++head) {
        const Sums own(shape, state, head);
        const Sums more(shape, const_cast<float*>(other), head);
        if (*more.sum == 0.0f) {
            continue;
        }
        const float largest = std::fmax(*own.largest, *more.largest);
        const float before = *own.sum == 0.0f ? 0.0f : std::exp(*own.largest - largest);
        const float now = std::exp(*more.largest - largest);
        *own.largest = largest;
        *own.sum = *own.sum * before + *more.sum * now;
        for (int i = 0; i < shape.head_dim; ++i) {
            own.values[i] = own.values[i] * before + more.values[i] * now;
        }
    }
}

// Scores become weights, relative to the largest so far.
void continue_softmax(const Shape& shape, const Sums& own, float* scores, int count) {
    float largest = *own.largest, sum = 0.0f;
    int i = 0;
    if (count >= kHalf) {
        Floats most = loaded(scores);
        for (; i + kHalf <= count; i += kHalf) {
            const Floats one = loaded(scores + i);
            most = one > most ? one : most;
        }
        for (int lane = 0; lane < kHalf; ++lane) {
            largest = most[lane] > largest ? most[lane] : largest;
        }
    }
    for (; i < count; ++i) {
        largest = scores[i] > largest ? scores[i] : largest;
    }
    for (i = 0; i < count; ++i) {
        scores[i] -= largest;
    }
    exponentials(scores, count);
    Floats sums{};
    for (i = 0; i + kHalf <= count; i += kHalf) {
        sums += loaded(scores + i);
    }
    for (int lane = 0; lane < kHalf; ++lane) {
        sum += sums[lane];
    }
    for (; i < count; ++i) {
        sum += scores[i];
    }
    if (largest > *own.largest) {
        const float factor = *own.sum == 0.0f ? 0.0f : std::exp(*own.largest - largest);
        *own.sum *= factor;
        for (int i = 0; i < shape.head_dim; ++i) {
            own.values[i] *= factor;
        }
        *own.largest = largest;
    }
    *own.sum += sum;
}

template <int kHeads, bool kHigh>
void score_keys(const Shape& shape, const Unit& unit, int kv_head, const float* query, int tokens,
                float* scores) {
    const int dim = shape.head_dim;
    float scaled[kHeads][kMostChannels];
    for (int group = 0; group < tokens / kLine; ++group) {
        const Block block = unit.keys(kv_head, group);
        float least[kMostChannels], steps[kMostChannels];
        for (int i = 0; i < dim; ++i) {
            least[i] = float_of_half(block.least[i]);
            steps[i] = float_of_half(block.steps[i]);
        }
        Floats sums[kHeads][2];
        for (int head = 0; head < kHeads; ++head) {
            const float* const own = query + head * dim;
            Floats offset{};
            for (int i = 0; i < dim; i += kHalf) {
                offset += loaded(own + i) * loaded(least + i);
                stored(scaled[head] + i, loaded(own + i) * loaded(steps + i));
            }
            float all = 0.0f;
            for (int i = 0; i < kHalf; ++i) {
                all += offset[i];
            }
            sums[head][0] = sums[head][1] = Floats{} + all;
        }
        add_lines<kHeads, kHigh>(block, dim, scaled[0], kMostChannels, sums);
        for (int head = 0; head < kHeads; ++head) {
            stored(scores + int64_t(head) * shape.unit_tokens + group * kLine, sums[head][0]);
            stored(scores + int64_t(head) * shape.unit_tokens + group * kLine + kHalf,
                   sums[head][1]);
        }
    }
}

// `scaled` has room for kHeads * unit_tokens floats, and for two more times unit_tokens.
template <int kHeads, bool kHigh>
void weigh_values(const Shape& shape, const Unit& unit, int kv_head, int tokens,
                  const float* weights, float* scaled, float* state) {
    const int64_t width = shape.unit_tokens;
    float* const least = scaled + kHeads * width;
    float* const steps = least + width;
    for (int group = 0; group < shape.head_dim / kLine; ++group) {
        const Block block = unit.values(kv_head, group);
        for (int i = 0; i < tokens; ++i) {
            least[i] = float_of_half(block.least[i]);
            steps[i] = float_of_half(block.steps[i]);
        }
        Floats sums[kHeads][2];
        for (int head = 0; head < kHeads; ++head) {
            Floats offset{};
            float all = 0.0f;
            int i = 0;
            for (; i + kHalf <= tokens; i += kHalf) {
                const Floats own = loaded(weights + head * width + i);
                offset += own * loaded(least + i);
                stored(scaled + head * width + i, own * loaded(steps + i));
            }
            for (; i < tokens; ++i) {
                all += weights[head * width + i] * least[i];
                scaled[head * width + i] = weights[head * width + i] * steps[i];
            }
            for (int lane = 0; lane < kHalf; ++lane) {
                all += offset[lane];
            }
            sums[head][0] = sums[head][1] = Floats{} + all;
        }
        add_lines<kHeads, kHigh>(block, tokens, scaled, width, sums);
        for (int head = 0; head < kHeads; ++head) {
            float* const out =
                Sums(shape, state, kv_head * kHeads + head).values + group * kLine;
            stored(out, loaded(out) + sums[head][0]);
            stored(out + kHalf, loaded(out + kHalf) + sums[head][1]);
        }
    }
}

void add_row(const float* row, float weight, int dim, float* out) {
    for (int i = 0; i < dim; ++i) {
        out[i] += weight * row[i];
    }
}

template <int kHeads, bool kHigh>
void attend_unit(const Shape& shape, const uint8_t* start, const float* query, int64_t first,
                 int64_t key_tokens, int64_t value_tokens, const Newest* newest, float* work,
                 float* state) {
    const Unit unit(shape, start);
    const int64_t width = shape.unit_tokens;
    const int keys = int(key_tokens - first < width ? key_tokens - first : width);
    if (keys <= 0) {
        return;
    }
    const int64_t left = value_tokens - first;
    const int values = int(left < 0 ? 0 : left < keys ? left : keys);
    float* const scores = work;
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        const float* const own = query + int64_t(kv_head) * kHeads * shape.head_dim;
        score_keys<kHeads, kHigh>(shape, unit, kv_head, own, keys, scores);
        for (int head = 0; head < kHeads; ++head) {
            const Sums sums(shape, state, kv_head * kHeads + head);
            continue_softmax(shape, sums, scores + head * width, keys);
            for (int i = values; i < keys; ++i) {
                const float* const rows =
                    newest->values + int64_t(kv_head) * kRows * shape.head_dim;
                add_row(rows + (first + i) % kRows * shape.head_dim, scores[head * width + i],
                        shape.head_dim, sums.values);
            }
        }
        weigh_values<kHeads, kHigh>(shape, unit, kv_head, values, scores,
                                    work + kHeads * width, state);
    }
}

void attend_newest(const Shape& shape, const float* query, int64_t key_tokens,
                   const Newest& newest, float* state) {
    const int dim = shape.head_dim;
    const int count = int(newest.length - key_tokens);
    float scores[kRows];
    for (int head = 0; head < shape.kv_heads * shape.group; ++head) {
        const int64_t place = int64_t(head / shape.group) * kRows * dim;
        const float* const own = query + int64_t(head) * dim;
        for (int i = 0; i < count; ++i) {
            const float* const key = newest.keys + place + (key_tokens + i) % kRows * dim;
            Floats sum{};
            for (int k = 0; k < dim; k += kHalf) {
                sum += loaded(own + k) * loaded(key + k);
            }
            scores[i] = 0.0f;
            for (int lane = 0; lane < kHalf; ++lane) {
                scores[i] += sum[lane];
            }
        }
        const Sums sums(shape, state, head);
        continue_softmax(shape, sums, scores, count);
        for (int i = 0; i < count; ++i) {
            const float* const row = newest.values + place + (key_tokens + i) % kRows * dim;
            add_row(row, scores[i], dim, sums.values);
        }
    }
}

// Threads that wait for work for the whole life of the process. Who calls works, too, and waits for
// those alone that have begun: one that wakes late finds nothing left.
class Workers {
public:
    static Workers& all() {
        static Workers* const own = new Workers;
        return *own;
    }

    void run(int helpers, const std::function<void()>& work) {
        const std::lock_guard<std::mutex> one_call(calls_);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (; there_ < helpers; ++there_) {
                std::thread([this] { help(); }).detach();
            }
            work_ = helpers > 0 ? &work : nullptr;
            wanted_ = helpers;
            ++number_;
        }
        wake_.notify_all();
        work();
        std::unique_lock<std::mutex> lock(mutex_);
        work_ = nullptr;
        ended_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void help() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return number_ != seen; });
            seen = number_;
            if (!work_ || busy_ >= wanted_) {
                continue;
            }
            const std::function<void()>& own = *work_;
            ++busy_;
            lock.unlock();
            own();
            lock.lock();
            if (--busy_ == 0) {
                ended_.notify_all();
            }
        }
    }

    std::mutex calls_, mutex_;
    std::condition_variable wake_, ended_;
    const std::function<void()>* work_ = nullptr;
    uint64_t number_ = 0;
    int there_ = 0, wanted_ = 0, busy_ = 0;
};

using AttendUnit = void (*)(const Shape&, const uint8_t*, const float*, int64_t, int64_t, int64_t,
                            const Newest*, float*, float*);

template <bool kHigh>
AttendUnit for_heads(int heads) {
    switch (heads) {
        case 1: return attend_unit<1, kHigh>;
        case 2: return attend_unit<2, kHigh>;
        case 3: return attend_unit<3, kHigh>;
        case 4: return attend_unit<4, kHigh>;
        case 5: return attend_unit<5, kHigh>;
        case 6: return attend_unit<6, kHigh>;
        case 7: return attend_unit<7, kHigh>;
        case 8: return attend_unit<8, kHigh>;
        default: return nullptr;
    }
}

}  // namespace

#define OWN_API extern "C" __attribute__((visibility("default")))

// Bytes of a unit; 0 where the shape is not one that is read here.
OWN_API int64_t few_bits_unit_bytes(const Shape* shape) {
    const bool known = shape->head_dim % kLine == 0 && shape->head_dim <= kMostChannels &&
                       shape->group >= 1 && shape->group <= kMostHeads && shape->bits >= 4 &&
                       shape->bits <= 5 && shape->unit_tokens % kRows == 0;
    if (!known) {
        return 0;
    }
    const int64_t keys = Block::size(shape->head_dim, shape->bits) * (shape->unit_tokens / kLine);
    const int64_t values = Block::size(shape->unit_tokens, shape->bits) * (shape->head_dim / kLine);
    return shape->kv_heads * (keys + values);
}

// Code `count` tokens, whole groups of 32; rows of a head are 128 * head_dim floats apart.
OWN_API void few_bits_code_keys(const Shape* shape, uint8_t* unit, int64_t first, int64_t count,
                                const float* keys) {
    for (int head = 0; head < shape->kv_heads; ++head) {
        for (int64_t at = 0; at < count; at += kLine) {
            const Block block = Unit(*shape, unit).keys(head, int((first + at) / kLine));
            const float* const items =
                keys + (int64_t(head) * kRows + at) * shape->head_dim;
            encode(block, 0, shape->head_dim, shape->bits, items, 1, shape->head_dim);
        }
    }
}

OWN_API void few_bits_code_values(const Shape* shape, uint8_t* unit, int64_t first, int64_t count,
                                  const float* values) {
    for (int head = 0; head < shape->kv_heads; ++head) {
        for (int group = 0; group < shape->head_dim / kLine; ++group) {
            const Block block = Unit(*shape, unit).values(head, group);
            const float* const items =
                values + int64_t(head) * kRows * shape->head_dim + group * kLine;
            encode(block, int(first), int(count), shape->bits, items, shape->head_dim, 1);
        }
    }
}

OWN_API void few_bits_begin(const Shape* shape, float* state) { clear(*shape, state); }

// Attend to units that lie one behind the other, and in the last call to the newest tokens.
// Keys are coded up to token key_tokens, values up to value_tokens; see codes.py.
OWN_API void few_bits_attend(const Shape* shape, const float* query, const uint8_t* units,
                             int64_t count, int64_t first, int64_t key_tokens,
                             int64_t value_tokens, const Newest* newest, int32_t is_last,
                             float* state) {
    const int64_t unit_bytes = few_bits_unit_bytes(shape);
    const AttendUnit attend =
        shape->bits > 4 ? for_heads<true>(shape->group) : for_heads<false>(shape->group);
    const int64_t heads = int64_t(shape->kv_heads) * shape->group;
    // Parts are the same whoever works on them, and so is every bit of their sum.
    const int64_t parts = count < kParts ? (count ? count : 1) : kParts;
    const int64_t size = heads * Sums::size(*shape);
    std::vector<float> states(size_t((parts - 1) * size));
    std::atomic<int64_t> next{0};
    const std::function<void()> work = [&] {
        std::vector<float> room(size_t(2 * shape->group + 2) * size_t(shape->unit_tokens));
        for (int64_t part = next++; part < parts; part = next++) {
            float* const own = part ? states.data() + (part - 1) * size : state;
            if (part) {
                clear(*shape, own);
            }
            for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
                attend(*shape, units + i * unit_bytes, query, first + i * shape->unit_tokens,
                       key_tokens, value_tokens, newest, room.data(), own);
            }
        }
    };
    Workers::all().run(shape->threads - 1, work);
    for (int64_t part = 1; part < parts; ++part) {
        add(*shape, state, states.data() + (part - 1) * size);
    }
    if (newest && is_last) {
        attend_newest(*shape, query, key_tokens, *newest, state);
    }
}
