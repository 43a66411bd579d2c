// SPDX-License-Identifier: Apache-2.0
// How a DATAFLOW region names its processes.
//
// To the synthesis tool `PROCESS(f(a, b));` is the call itself. The threaded simulation defines
// the macro otherwise and runs every process as a thread over bounded streams, so that a FIFO that
// is too shallow deadlocks there as it would in hardware.
#pragma once

#ifndef PROCESS
#define PROCESS(...) __VA_ARGS__
#endif
