// SPDX-License-Identifier: Apache-2.0
// Attention over rows and coded tokens in plain C++, for any machine.
#include "coded_plain.h"

namespace {

struct Portable : PlainCodes {};

}  // namespace

namespace hillinfer {
const CodedKernels kPortableCoded = coded_kernels_of<Portable>();
}
