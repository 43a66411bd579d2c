// SPDX-License-Identifier: Apache-2.0
// Memory behind the three bundles of a kernel: latency, one shared data bus, refresh, stalls,
// errors, and writes that become visible only with their response.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "harness.h"

constexpr uint64_t BEAT = 64;

class MemoryModel {
public:
    struct Write {
        uint64_t address;
        uint32_t beats, taken;
        bool response_error;
        uint64_t ready;
        std::vector<std::pair<uint64_t, std::vector<uint8_t>>> held;
    };
    struct Read {
        uint64_t address;
        uint32_t left;
        uint64_t ready;
    };

    MemoryModel(const Launch& launch, Outcome& outcome)
        : launch_(launch), memory_(launch.memory), outcome_(outcome), random_(2 * launch.memory.seed + 1) {}

    // Read channel.
    bool accepts_read(int port) { return reads_[port].size() < memory_.outstanding && !stalls(0); }
    void read(int port, uint64_t address, uint32_t beats, uint64_t now) {
        uint64_t ready = now + uniform(memory_.read_min, memory_.read_max);
        if (!reads_[port].empty()) ready = std::max(ready, reads_[port].back().ready);
        reads_[port].push_back({address, beats, ready});
        outcome_.read_bursts[port]++;
    }
    bool has_beat(int port, uint64_t now) const {
        return !reads_[port].empty() && reads_[port].front().ready <= now;
    }
    // The beat to offer: its data, whether it is the last, its response.
    void offer(int port, void* data, bool& last, int& response) {
        const Read& burst = reads_[port].front();
        const Buffer* buffer = find(burst.address);
        if (buffer) {
            memcpy(data, buffer->data + (burst.address - buffer->address), BEAT);
            response = 0;
        } else {
            outcome_.stray_reads++;
            memset(data, 0, BEAT);
            response = 3;
        }
        last = burst.left == 1;
        if (memory_.read_error[port] == (int64_t)outcome_.read_beats[port]) {
            memset(data, 0xEE, BEAT);
            response = 2;
        }
    }
    void beat_taken(int port) {
        Read& burst = reads_[port].front();
        burst.address += BEAT;
        outcome_.read_beats[port]++;
        if (--burst.left == 0) reads_[port].pop_front();
    }

    // Write channel.
    bool accepts_write() {
        return open_.size() + answers_.size() < memory_.outstanding && !stalls(2);
    }
    void write(uint64_t address, uint32_t beats) {
        open_.push_back({address, beats, 0, false, 0, {}});
        outcome_.write_bursts++;
    }
    bool expects_data() const { return !open_.empty(); }
    bool stalls_data() { return stalls(3); }
    bool data(const void* bytes, bool last, uint64_t now) {
        Write& burst = open_.front();
        uint64_t address = burst.address + BEAT * burst.taken;
        std::vector<uint8_t> content(BEAT);
        memcpy(content.data(), bytes, BEAT);
        outcome_.write_beats++;
        // Status beats become visible at once: the worst order that a memory may choose.
        if (memory_.commit_at_response && !is_status(address)) burst.held.push_back({address, content});
        else commit(address, content);
        burst.taken++;
        bool ends = burst.taken == burst.beats;
        if (ends) {
            burst.ready = now + uniform(memory_.write_min, memory_.write_max);
            if (!answers_.empty()) burst.ready = std::max(burst.ready, answers_.back().ready);
            burst.response_error = memory_.write_error == (int64_t)answered_;
            answered_++;
            answers_.push_back(burst);
            open_.pop_front();
        }
        return ends == last;
    }
    bool has_answer(uint64_t now) {
        return !answers_.empty() && answers_.front().ready <= now && !stalls(4);
    }
    int answer() {
        Write& burst = answers_.front();
        if (!burst.response_error)
            for (auto& beat : burst.held) commit(beat.first, beat.second);
        burst.held.clear();
        return burst.response_error ? 2 : 0;
    }
    void answer_taken() { answers_.pop_front(); }

    bool anything_open() const {
        bool reads = false;
        for (auto& queue : reads_) reads |= !queue.empty();
        return reads || !open_.empty() || !answers_.empty();
    }
    bool stalls(int channel) {
        return memory_.stall_percent[channel] && uniform(0, 99) < memory_.stall_percent[channel];
    }
    bool refreshes(uint64_t now) const {
        return memory_.refresh_period && now % memory_.refresh_period < memory_.refresh_cycles;
    }

private:
    uint32_t uniform(uint32_t low, uint32_t high) {
        random_ ^= random_ << 13;
        random_ ^= random_ >> 7;
        random_ ^= random_ << 17;
        return low + (uint32_t)((random_ >> 11) % (high - low + 1));
    }
    const Buffer* find(uint64_t address) const {
        for (uint64_t i = 0; i < launch_.buffer_count; i++) {
            const Buffer& buffer = launch_.buffers[i];
            if (address >= buffer.address && address + BEAT <= buffer.address + buffer.bytes)
                return &buffer;
        }
        return nullptr;
    }
    bool is_status(uint64_t address) const {
        const Snapshot& snapshot = launch_.snapshot;
        return address >= snapshot.status_address
            && address < snapshot.status_address + BEAT * snapshot.status_beats;
    }
    void commit(uint64_t address, const std::vector<uint8_t>& content) {
        const Buffer* buffer = find(address);
        if (!buffer || !buffer->writable) {
            outcome_.stray_writes++;
            return;
        }
        memcpy(buffer->data + (address - buffer->address), content.data(), BEAT);
        if (is_status(address)) check_snapshot(address, content);
    }
    // Every tuple counted complete must be in memory, and final.
    void check_snapshot(uint64_t address, const std::vector<uint8_t>& content) {
        const Snapshot& snapshot = launch_.snapshot;
        outcome_.status_writes++;
        if (!snapshot.expected) return;
        uint32_t count, tokens, stride;
        uint64_t offset;
        memcpy(&count, &content[12], 4);
        const uint8_t* descriptor = snapshot.segments + (address - snapshot.status_address);
        memcpy(&offset, descriptor + (snapshot.is_shadow ? 0 : 16), 8);
        memcpy(&tokens, descriptor + 32, 4);
        memcpy(&stride, descriptor + 40, 4);
        const Buffer* output = find(snapshot.output_address);
        if (count > tokens || !output) {
            outcome_.snapshot_errors++;
            return;
        }
        if (snapshot.is_shadow) {
            // The last group may be short of 64 tokens: it is complete with its segment.
            uint64_t beats = count == tokens
                ? snapshot.complete_beats[(address - snapshot.status_address) / BEAT]
                : (count / 64) * snapshot.group_beats;
            compare(output, BEAT * offset, BEAT * beats);
            return;
        }
        for (uint64_t array = 0; array < snapshot.arrays; array++)
            compare(output, BEAT * (offset + array * stride), 4 * (uint64_t)count);
    }
    void compare(const Buffer* output, uint64_t from, uint64_t bytes) {
        if (from + bytes > output->bytes
            || memcmp(output->data + from, launch_.snapshot.expected + from, bytes))
            outcome_.snapshot_errors++;
    }

    const Launch& launch_;
    const Memory& memory_;
    Outcome& outcome_;
    uint64_t random_;
    std::deque<Read> reads_[PORTS];
    std::deque<Write> open_, answers_;
    uint64_t answered_ = 0;
};
