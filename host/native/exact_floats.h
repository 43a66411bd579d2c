// SPDX-License-Identifier: Apache-2.0
// Float arithmetic as the contract has it, whatever a thread's own is.
//
// It has internal linkage: each instruction set's file compiles its own copy.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// While it lives subnormal numbers are kept and halves go to even. A thread begins with what its
// maker had at that moment, and keeps it: those of this library are made by whoever comes first.
class ExactFloats {
public:
#if defined(__x86_64__)
    ExactFloats() : before_(_mm_getcsr()) {
        _mm_setcsr(0x1F80);
        asm volatile("" : : : "memory");
    }

    ~ExactFloats() {
        asm volatile("" : : : "memory");
        _mm_setcsr(before_);
    }

private:
    unsigned before_;
#elif defined(__aarch64__)
    ExactFloats() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)) : "memory");
    }
    ~ExactFloats() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

private:
    uint64_t before_;
#else
    // Elsewhere nobody changes it.
    ExactFloats() {}
    ~ExactFloats() {}
#endif
};

}  // namespace
