// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens with NEON.
#include <arm_neon.h>

#include "coded_plain.h"

namespace {

struct Neon : PlainCodes {
    static void sums(const Arranged& arranged, int blocks, int tokens,
                     const Addends& addends, int heads, Ahead& ahead,
                     int32_t (*out)[kMostCodedChannels]) {
        for (int head = 0; head < heads; ++head) {
            for (int first = 0; first < blocks * 32; first += 32) {
                int32x4_t sums[8];
                for (int32x4_t& one : sums) {
                    one = vdupq_n_s32(0);
                }
                for (int token = 0; token < tokens; ++token) {
                    ahead.touch();
                    // Of 15 bits, so the sign is none.
                    const int16_t addend = int16_t(addends.of[head][token]);
                    const int16_t* codes = arranged.codes[token] + first;
                    for (int i = 0; i < 8; ++i) {
                        sums[i] = vmlal_n_s16(sums[i], vld1_s16(codes + 4 * i), addend);
                    }
                }
                for (int i = 0; i < 8; ++i) {
                    vst1q_s32(out[head] + first + 4 * i, sums[i]);
                }
            }
        }
    }
};

}  // namespace

namespace hillinfer {
const CodedKernels kNeonCoded = coded_kernels_of<Neon>();
}
