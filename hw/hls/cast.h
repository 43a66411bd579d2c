// SPDX-License-Identifier: Apache-2.0
// From FP16 keys to key codes, in integers only (scoring contract, sections 2 and 3).
//
// The exponent of a head is known when its last channel has come, so centring and rounding are two
// processes. The FIFO of centred channels between them must hold the beats of one head.
#pragma once

#include "commands.h"
#include "rules.h"

namespace hillinfer {

// Channels of two slices after centring: D, in units of 2^(c - 14).
struct CentredPair {
    ap_int<25> distance[2][SLICE_CHANNELS];
};

// D = Y - M of one channel. Where the FP16 code is a NaN its magnitude counts as 0.
inline ap_int<25> centre_channel(ap_uint<16> code, ap_uint<32> statistics, bool &is_nan) {
#pragma HLS INLINE
    constexpr int LIMIT = (1 << 23) - 1;
    const ap_uint<5> biased = code.range(14, 10);
    const ap_uint<10> fraction = code.range(9, 0);
    const bool special = biased == 31;
    is_nan = special && fraction != 0;
    ap_uint<11> magnitude = fraction;
    magnitude[10] = biased != 0;
    ap_uint<5> exponent = biased == 0 ? ap_uint<5>(1) : biased;
    if (special) {
        magnitude = is_nan ? 0 : 2047;
        exponent = is_nan ? 1 : 30;
    }
    const ap_int<8> scale = statistics.range(31, 24);
    const ap_int<24> mean = statistics.range(23, 0);
    const ap_int<10> shift = ap_int<10>(exponent) - ap_int<10>(scale) - 11;
    // A left shift of 13 or more saturates every normal number; subnormal ones are shifted by 4 at
    // most, since c is at least -14. A right shift of 11 leaves nothing.
    const ap_uint<4> left = shift > 13 ? ap_int<10>(13) : shift;
    const ap_uint<4> right = shift < -11 ? ap_int<10>(11) : ap_int<10>(-shift);
    const ap_uint<24> shifted = shift >= 0 ? ap_uint<24>(ap_uint<24>(magnitude) << left)
                                           : ap_uint<24>(magnitude >> right);
    const ap_int<24> limited = shifted > LIMIT ? ap_uint<24>(LIMIT) : shifted;
    const ap_int<25> value = code[15] ? ap_int<25>(-limited) : ap_int<25>(limited);
    return value - mean;
}

// Centres rows and finds the exponent of every head.
inline void centre_rows(hls::stream<WorkCommand> &commands, hls::stream<Beat> &statistics_beats,
                        hls::stream<Beat> &keys, hls::stream<CentredPair> &centred,
                        hls::stream<Exponents<1> > &exponents_to_round,
                        hls::stream<Exponents<1> > &exponents_to_keep) {
    constexpr int KEPT_BITS = CODE_BITS == 8 ? 7 : 3;
    // Statistics of slices 2n and 2n + 1 lie in banks of their own, because they are read together.
    // Those of the next segment are filled into the other half as they come.
    Beat even[2][ROW_BEATS];
    Beat odd[2][ROW_BEATS];
    // A round writes into the half that it does not read, and a round that changes halves lies
    // between the last write and the first read.
#pragma HLS DEPENDENCE variable=even type=intra dependent=false
#pragma HLS DEPENDENCE variable=odd type=intra dependent=false
#pragma HLS DEPENDENCE variable=even type=inter direction=RAW distance=2 dependent=true
#pragma HLS DEPENDENCE variable=odd type=inter direction=RAW distance=2 dependent=true
    int slot = 0;    // half of `even` and `odd` in use
    int loaded = 0;  // beats of the next segment in the other half
    WorkCommand c;
    bool told = false;  // whether `c` waits for its statistics
    uint32_t left = 0;  // beats of the segment
    int row_beat = 0;
    int slice = 0;
    ap_uint<24> bits_so_far = 0;
    bool nan_so_far = false;
    bool open = true;
centre_rounds:
    // recurrence: bits seen in a head, an OR; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        Beat key;
        if (left == 0) {
            if (!told) told = commands.read_nb(c);
            if (told && (c.end || loaded == STATISTICS_BEATS)) {
                open = !c.end;
                left = c.rounds;
                told = false;
                slot = 1 - slot;
                loaded = 0;
            }
        } else if (keys.read_nb(key)) {
            const Beat statistics[2] = {even[slot][row_beat], odd[slot][row_beat]};
            CentredPair out;
            // The OR of magnitudes is as long as their maximum.
            ap_uint<24> bits[2] = {0, 0};
            bool nan[2] = {false, false};
            for (int pair = 0; pair < 2; ++pair) {
#pragma HLS UNROLL
                for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                    const int bit = 16 * (SLICE_CHANNELS * pair + j);
                    bool is_nan;
                    const ap_int<25> distance =
                        centre_channel(key.range(bit + 15, bit),
                                       statistics[pair].range(32 * j + 31, 32 * j), is_nan);
                    out.distance[pair][j] = distance;
                    bits[pair] |= distance < 0 ? ap_uint<24>(-distance) : ap_uint<24>(distance);
                    nan[pair] |= is_nan;
                }
            }
            centred.write(out);
            // The low slice can end one head and the high slice start the next one.
            const bool low_ends_head = slice == SLICES - 1;
            const bool high_ends_head = slice == SLICES - 2;
            const ap_uint<24> bits_before = slice == 0 ? ap_uint<24>(0) : bits_so_far;
            const bool nan_before = slice != 0 && nan_so_far;
            const ap_uint<24> bits_low = bits_before | bits[0];
            const bool nan_low = nan_before || nan[0];
            bits_so_far = low_ends_head ? bits[1] : ap_uint<24>(bits_low | bits[1]);
            nan_so_far = low_ends_head ? nan[1] : nan_low || nan[1];
            if (low_ends_head || high_ends_head) {
                const ap_uint<24> head_bits = low_ends_head ? bits_low : bits_so_far;
                const bool head_nan = low_ends_head ? nan_low : nan_so_far;
                const ap_uint<6> length = bit_length<24>(head_bits);
                Exponents<1> exponent;
                exponent.exponent[0] = length > KEPT_BITS ? ap_uint<8>(length - KEPT_BITS)
                                                          : ap_uint<8>(0);
                if (head_nan) exponent.exponent[0] = INVALID_EXPONENT;
                exponents_to_round.write(exponent);
                exponents_to_keep.write(exponent);
            }
            // Where a row has an odd number of slices, its last half beat is padding.
            const bool row_ends = row_beat == ROW_BEATS - 1;
            if (row_ends || high_ends_head) {
                slice = 0;
            } else {
                slice = low_ends_head ? 1 : slice + 2;
            }
            row_beat = row_ends ? 0 : row_beat + 1;
            --left;
        }
        Beat coming;
        if (loaded < STATISTICS_BEATS && statistics_beats.read_nb(coming)) {
            if (loaded % 2 == 0) {
                even[1 - slot][loaded / 2] = coming;
            } else {
                odd[1 - slot][loaded / 2] = coming;
            }
            ++loaded;
        }
    }
}

// rne(D · 2^-t), limited; INT2 takes the floor instead. One shift serves all lanes of a head.
inline KeyCode round_channel(ap_int<25> distance, ap_uint<8> exponent) {
#pragma HLS INLINE
    constexpr int LIMIT = (1 << (CODE_BITS - 1)) - 1;
    // An exponent is 21 at most; that of an invalid head leaves codes that are dropped.
    const ap_uint<5> shift = exponent;
    if (CODE_BITS == 2) {
        const ap_int<25> floor = distance >> (shift + 1);
        return floor > 1 ? ap_int<25>(1) : (floor < -2 ? ap_int<25>(-2) : floor);
    }
    // One more bit below: the first one that is cut off.
    const ap_int<26> doubled = (ap_int<26>(distance) << 1) >> shift;
    const ap_uint<25> ones = (ap_uint<25>(1) << shift) - 1;
    const bool rest = (ap_uint<25>(distance) & (ones >> 1)) != 0;
    const ap_int<26> floor = doubled >> 1;
    const bool up = doubled[0] && (rest || floor[0]);
    const ap_int<26> rounded = floor + (up ? 1 : 0);
    return rounded > LIMIT ? ap_int<26>(LIMIT) : (rounded < -LIMIT ? ap_int<26>(-LIMIT) : rounded);
}

inline void round_rows(hls::stream<WorkCommand> &commands, hls::stream<CentredPair> &centred,
                       hls::stream<Exponents<1> > &exponents, hls::stream<CodePair> &codes) {
    WorkCommand c;
    uint32_t left = 0;  // beats of the segment
    int row_beat = 0;
    int slice = 0;
    ap_uint<8> exponent = 0;
    CentredPair in;
    bool has_beat = false;  // whether `in` is to be rounded
    Exponents<1> next;
    bool has_next = false;  // whether `next` is the exponent of the head that starts next
    bool open = true;
round_rounds:
    // recurrence: exponent of the head, one register; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        if (!has_beat) has_beat = centred.read_nb(in);
        if (!has_next) has_next = exponents.read_nb(next);
        if (left == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                left = c.rounds;
            }
        } else if (has_beat) {
            const bool row_ends = row_beat == ROW_BEATS - 1;
            const bool low_starts_head = slice == 0;
            const bool low_ends_head = slice == SLICES - 1;
            const bool high_ends_head = slice == SLICES - 2;
            // Behind the last head of a row there is only padding.
            const bool high_is_padding = row_ends && TOKEN_SLICES % 2 == 1;
            const bool high_starts_head = low_ends_head && !high_is_padding;
            const bool starts_head = low_starts_head || high_starts_head;
            if (has_next || !starts_head) {
                ap_uint<8> low_exponent = exponent;
                // A head has four slices or more, so a beat starts one head at most.
                if (starts_head) exponent = next.exponent[0];
                if (low_starts_head) low_exponent = exponent;
                CodePair out;
                for (int j = 0; j < SLICE_CHANNELS; ++j) {
#pragma HLS UNROLL
                    out.code[0][j] = low_exponent == INVALID_EXPONENT
                                         ? KeyCode(0)
                                         : round_channel(in.distance[0][j], low_exponent);
                    out.code[1][j] = exponent == INVALID_EXPONENT
                                         ? KeyCode(0)
                                         : round_channel(in.distance[1][j], exponent);
                }
                codes.write(out);
                if (row_ends || high_ends_head) {
                    slice = 0;
                } else {
                    slice = low_ends_head ? 1 : slice + 2;
                }
                row_beat = row_ends ? 0 : row_beat + 1;
                if (starts_head) has_next = false;
                has_beat = false;
                --left;
            }
        }
    }
}

}  // namespace hillinfer
