// SPDX-License-Identifier: Apache-2.0
// Segment descriptors and what makes one wrong (scoring contract, section 10).
#pragma once

#include "commands.h"

namespace hillinfer {

struct Descriptor {
    uint64_t shadow;
    uint64_t query;
    uint64_t score;
    uint64_t base_position;
    uint32_t tokens;
    uint32_t row_stride;
    uint32_t score_stride;
    uint64_t statistics;
    bool reserved_not_zero;
};

inline Descriptor unpack_descriptor(const Beat &beat) {
#pragma HLS INLINE
    Descriptor d;
    d.shadow = beat.range(63, 0).to_uint64();
    d.query = beat.range(127, 64).to_uint64();
    d.score = beat.range(191, 128).to_uint64();
    d.base_position = beat.range(255, 192).to_uint64();
    d.tokens = beat.range(287, 256).to_uint64();
    d.row_stride = beat.range(319, 288).to_uint64();
    d.score_stride = beat.range(351, 320).to_uint64();
    d.statistics = beat.range(447, 384).to_uint64();
    d.reserved_not_zero = beat.range(383, 352) != 0 || beat.range(511, 448) != 0;
    return d;
}

// Reserved fields come first: a beat that is no descriptor at all most likely shows there.
inline LaunchError judge(const Descriptor &d, bool fields_fit) {
#pragma HLS INLINE
    if (d.reserved_not_zero) return ERROR_RESERVED;
    const bool segment_fits =
        d.base_position % SEGMENT_TOKENS == 0 && d.tokens <= uint32_t(SEGMENT_TOKENS);
    return segment_fits && fields_fit ? ERROR_NONE : ERROR_DESCRIPTOR;
}

inline LaunchError check_score_descriptor(const Descriptor &d, uint32_t scope) {
#pragma HLS INLINE
    const bool source_fits = FP16_ROWS ? d.row_stride >= uint32_t(ROW_BEATS)
                                       : d.row_stride == 0 && d.statistics == 0;
    const uint64_t array_beats = (uint64_t(d.tokens) + TUPLES_PER_BEAT - 1) / TUPLES_PER_BEAT;
    const bool known = scope % 256 <= 1 && further_queries(scope) < uint32_t(QUERIES);
    const bool target_fits = scope == 0 ? d.score_stride == 0 : d.score_stride >= array_beats;
    return judge(d, known && source_fits && target_fits);
}

inline LaunchError check_shadow_descriptor(const Descriptor &d) {
#pragma HLS INLINE
    return judge(d, d.row_stride >= uint32_t(ROW_BEATS) && d.score == 0 && d.score_stride == 0);
}

}  // namespace hillinfer
