// SPDX-License-Identifier: Apache-2.0
// Reads key beats (bundle gmem0) in bursts that are requested ahead of their data.
//
// Behind a plain pointer the tool requests a burst when the loop that reads it starts, so every
// segment, and every row of K||V rows, would cost one latency of the memory. `burst_maxi` has
// requests and data apart: up to 16 bursts are under way across rows and segments.
#pragma once

#include <hls_burst_maxi.h>

#include "commands.h"

namespace hillinfer {

constexpr int BURST_BEATS = 64;
// As many bursts as the adapter of the port holds (num_read_outstanding), so that every requested
// beat has its place there and the memory's bus never waits for this kernel.
constexpr int BURSTS_UNDER_WAY = 16;
// Rounds from a request to the first beat that is taken of it. A round that waits for a beat stops
// the whole pipeline, and the request of the round before it can lie in a later stage than that.
constexpr int REQUEST_LEAD = 8;

struct Burst {
    bool end;
    uint64_t offset;  // beats from the start of the buffer
    ap_uint<7> beats;
};

// Cuts runs into bursts that end where offsets are multiples of 64 beats. An AXI4 burst must not
// cross 4 KiB: where the buffer starts at a multiple of that no burst does, and elsewhere the
// adapter cuts once more.
inline void plan_bursts(hls::stream<ReadCommand> &commands, hls::stream<Burst> &bursts) {
    ReadCommand c;
    uint32_t runs = 0;  // still to do
    uint64_t first = 0;
    uint64_t last = 0;
    uint64_t offset = 0;
    bool open = true;
plan_rounds:
    // recurrence: offset of the burst and ends of the run, one 64-bit addition; distance 1
    while (open) {
#pragma HLS PIPELINE II=1 style=stp
        if (runs == 0) {
            if (commands.read_nb(c)) {
                open = !c.end;
                runs = c.runs;
                first = c.first;
                last = c.last;
                offset = c.first;
                if (c.end) {
                    const Burst end = {true, 0, 0};
                    bursts.write(end);
                }
            }
        } else {
            const bool run_ends = offset / BURST_BEATS == last / BURST_BEATS;
            const ap_uint<7> stop = run_ends ? last % BURST_BEATS : uint64_t(BURST_BEATS - 1);
            const Burst burst = {false, offset, ap_uint<7>(stop - offset % BURST_BEATS + 1)};
            bursts.write(burst);
            if (run_ends) {
                --runs;
                offset = first + c.stride;
                first = first + c.stride;
                last = last + c.stride;
            } else {
                offset = (offset | (BURST_BEATS - 1)) + 1;
            }
        }
    }
}

// Requests bursts and passes their beats on.
//
// A beat is taken in every round in which 16 bursts are under way or no other one is known; so the
// first rounds only request. Taking comes before requesting in the round, so that no more bursts
// are under way than are counted, however deep the pipeline is. A request has left the pipeline
// before its beats are waited for, as long as it lies fewer than REQUEST_LEAD stages behind the
// beat. A round waits for a beat that was requested or for room in `keys`, never for another burst.
inline void read_keys(hls::burst_maxi<Beat> memory, hls::stream<Burst> &bursts,
                      hls::stream<Beat> &keys) {
    ap_uint<6> last_beat[BURSTS_UNDER_WAY];  // of the bursts under way, in a ring
#pragma HLS ARRAY_PARTITION variable=last_beat complete dim=0
    ap_uint<4> oldest = 0;
    ap_uint<4> newest = 0;
    ap_uint<5> under_way = 0;
    ap_uint<5> ready = 0;  // of those: requested REQUEST_LEAD rounds ago or more
    ap_uint<REQUEST_LEAD> requested = 0;  // whether each of the last rounds requested one
    ap_uint<6> taken = 0;  // beats of the oldest burst
    Burst next;
    bool known = false;  // whether `next` waits to be requested
    bool open = true;
read_rounds:
    // recurrence: bursts under way and beats taken, one increment; distance 1
    // access: manual bursts
    while (open || under_way != 0) {
#pragma HLS PIPELINE II=1 style=stp
        const bool requests = known && under_way != BURSTS_UNDER_WAY;
        const bool fills = requests && under_way != BURSTS_UNDER_WAY - 1;
        const bool takes = ready != 0 && !fills;
        const bool gets_ready = requested[REQUEST_LEAD - 1];
        const bool burst_ends = takes && taken == last_beat[oldest];
        if (takes) {
            keys.write(memory.read());
            taken = burst_ends ? ap_uint<6>(0) : ap_uint<6>(taken + 1);
        }
        if (requests) {
            memory.read_request(next.offset, next.beats);
            last_beat[newest] = next.beats - 1;
            ++newest;
            known = false;
        }
        if (burst_ends) ++oldest;
        if (requests && !burst_ends) {
            ++under_way;
        } else if (burst_ends && !requests) {
            --under_way;
        }
        if (gets_ready && !burst_ends) {
            ++ready;
        } else if (burst_ends && !gets_ready) {
            --ready;
        }
        requested = (requested << 1) | ap_uint<REQUEST_LEAD>(requests);
        if (open && !known && bursts.read_nb(next)) {
            open = !next.end;
            known = !next.end;
        }
    }
}

}  // namespace hillinfer
