// SPDX-License-Identifier: Apache-2.0
// What crosses between Python and the simulated kernel. `tools/hillinfer_hw/harness.py` holds the
// same structures; the static_asserts keep the two from drifting apart.
#pragma once

#include <cstdint>

constexpr int PORTS = 3;

struct Buffer {
    uint64_t address;
    uint8_t* data;
    uint64_t bytes;
    uint64_t writable;
};

// How memory behaves. Latencies are uniform in [min, max], in cycles.
struct Memory {
    uint32_t read_min, read_max;    // address accepted to first beat
    uint32_t write_min, write_max;  // last beat to response
    uint32_t shared_bus;            // 1: one beat a cycle for all ports and directions
    uint32_t refresh_period, refresh_cycles;
    uint32_t outstanding;           // bursts per port and direction
    uint32_t stall_percent[5];      // AR, R, AW, W, B
    uint32_t commit_at_response;    // 1: written data is visible when its response is given
    uint64_t seed;
    int64_t read_error[PORTS];      // which read beat of the port comes with SLVERR; -1 none
    int64_t write_error;            // which write response is SLVERR; -1 none
};

// What the snapshot check compares, whenever a status beat reaches memory.
struct Snapshot {
    uint64_t status_address, status_beats;
    uint64_t output_address;
    const uint8_t* expected;        // the output buffer at the end; null: no check
    const uint8_t* segments;        // descriptors
    uint64_t is_shadow;
    uint64_t arrays;                // score arrays of a segment
    uint64_t group_beats;           // of a shadow: a group of 64 tokens
    const uint64_t* complete_beats; // of a shadow: beats of each segment, its last group included
};

struct Launch {
    const Buffer* buffers;
    uint64_t buffer_count;
    const uint32_t* registers;      // offset, value, offset, value, ...
    uint64_t register_count;
    Memory memory;
    Snapshot snapshot;
    uint64_t max_cycles;
    uint64_t reset_at;              // cycle of the launch in which reset falls; 0 none
};

struct Outcome {
    uint64_t cycles;                // ap_start written to ap_done
    uint64_t read_beats[PORTS], read_bursts[PORTS];
    uint64_t write_beats, write_bursts;
    uint64_t refresh;               // cycles of the launch in which no beat could pass
    uint64_t status_writes;
    uint64_t stray_reads, stray_writes;
    uint64_t snapshot_errors;
    uint64_t violations;            // bits of Violation
    uint64_t ended;                 // 1 done, 0 still running after max_cycles, 2 was reset
};

enum Violation : uint64_t {
    UNSTABLE = 1,        // a valid fell or its payload changed before ready
    CROSSES_4K = 2,
    BAD_ATTRIBUTES = 4,  // size, burst type, strobes, unaligned address
    BAD_LAST = 8,
    LONG_BURST = 16,     // more than 64 beats
    UNUSED_CHANNEL = 32, // a write on a read bundle or the other way round
    CONTROL = 64,        // the register map does not answer as it must
    OPEN_AT_END = 128,   // a burst was open at ap_done
    NOT_READY = 256,     // the kernel asked for more than it can hold
};

static_assert(sizeof(Buffer) == 32);
static_assert(sizeof(Memory) == 96);
static_assert(sizeof(Snapshot) == 72);
static_assert(sizeof(Launch) == 216);
static_assert(sizeof(Outcome) == 8 * 16);
