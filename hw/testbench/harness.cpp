// SPDX-License-Identifier: Apache-2.0
// The Verilated kernel between a control master and the memory model, without Python per cycle.
#include "memory.h"

#include <memory>

#include "Vkernel.h"
#include "verilated.h"

namespace {

struct Address {
    CData &valid, &ready;
    QData& address;
    CData &length, &size, &burst;
};

struct ReadData {
    CData &valid, &ready;
    VlWide<16>& data;
    CData &last, &response;
};

class Session {
public:
    Session() : kernel_(&context_) {}
    ~Session() { kernel_.final(); }
    void run(const Launch& launch, Outcome& outcome);
    // For a caller that plays the host itself: memory for good, registers, and cycles in between.
    void attach(const Launch& launch);
    uint32_t read(uint32_t offset) { return control_read(offset, *attached_, outcome_); }
    void write(uint32_t offset, uint32_t value) {
        control_write(offset, value, *attached_, outcome_);
    }
    void cycles(uint64_t count) { while (count--) cycle(*attached_, outcome_); }
    uint64_t now() const { return now_; }
    const Outcome& so_far() const { return outcome_; }

private:
    // Settles what the inputs change, then one rising edge.
    void settle() { kernel_.ap_clk = 0; kernel_.eval(); }
    void edge() { kernel_.ap_clk = 1; kernel_.eval(); now_++; }
    void reset();
    void cycle(MemoryModel& memory, Outcome& outcome);
    void idle_bus();
    void control_write(uint32_t offset, uint32_t value, MemoryModel& memory, Outcome& outcome);
    uint32_t control_read(uint32_t offset, MemoryModel& memory, Outcome& outcome);
    void check_burst(const Address& channel, Outcome& outcome);
    void check_stable(Outcome& outcome);

    // What a caller attached.
    Launch launch_{};
    Outcome outcome_{};
    std::unique_ptr<MemoryModel> attached_;

    VerilatedContext context_;
    Vkernel kernel_;
    uint64_t now_ = 0;
    bool fresh_ = true;
    bool offered_[PORTS] = {}, answer_offered_ = false;
    int turn_ = 0;
    bool shared_ = false;
    uint64_t written_at_ = 0;
    // The previous cycle's valid payloads that were not taken.
    struct Pending {
        bool waits = false;
        uint64_t address = 0;
        uint32_t length = 0;
    } pending_[3];
    bool word_waits_ = false, word_last_ = false;
    uint8_t word_[BEAT] = {};
};

void Session::idle_bus() {
    Vkernel& k = kernel_;
    k.m_axi_gmem0_ARREADY = k.m_axi_gmem1_ARREADY = k.m_axi_gmem2_ARREADY = 0;
    k.m_axi_gmem0_RVALID = k.m_axi_gmem1_RVALID = k.m_axi_gmem2_RVALID = 0;
    k.m_axi_gmem0_AWREADY = k.m_axi_gmem1_AWREADY = k.m_axi_gmem2_AWREADY = 0;
    k.m_axi_gmem0_WREADY = k.m_axi_gmem1_WREADY = k.m_axi_gmem2_WREADY = 0;
    k.m_axi_gmem0_BVALID = k.m_axi_gmem1_BVALID = k.m_axi_gmem2_BVALID = 0;
    k.s_axi_control_AWVALID = k.s_axi_control_WVALID = k.s_axi_control_ARVALID = 0;
    k.s_axi_control_BREADY = k.s_axi_control_RREADY = 1;
}

void Session::reset() {
    idle_bus();
    kernel_.ap_rst_n = 0;
    for (int i = 0; i < 8; i++) { settle(); edge(); }
    kernel_.ap_rst_n = 1;
    for (int i = 0; i < 2; i++) { settle(); edge(); }
    for (bool& offered : offered_) offered = false;
    answer_offered_ = false;
    for (auto& pending : pending_) pending.waits = false;
    word_waits_ = false;
}

void Session::check_burst(const Address& channel, Outcome& outcome) {
    uint64_t bytes = BEAT * (channel.length + 1u);
    if (channel.length >= 64) outcome.violations |= LONG_BURST;
    if (channel.address / 4096 != (channel.address + bytes - 1) / 4096)
        outcome.violations |= CROSSES_4K;
    if (channel.size != 6 || channel.burst != 1 || channel.address % BEAT)
        outcome.violations |= BAD_ATTRIBUTES;
}

// One cycle: memory chooses its answers from what the kernel shows, then the edge.
void Session::cycle(MemoryModel& memory, Outcome& outcome) {
    Vkernel& k = kernel_;
    Address reads[2] = {
        {k.m_axi_gmem0_ARVALID, k.m_axi_gmem0_ARREADY, k.m_axi_gmem0_ARADDR, k.m_axi_gmem0_ARLEN,
         k.m_axi_gmem0_ARSIZE, k.m_axi_gmem0_ARBURST},
        {k.m_axi_gmem1_ARVALID, k.m_axi_gmem1_ARREADY, k.m_axi_gmem1_ARADDR, k.m_axi_gmem1_ARLEN,
         k.m_axi_gmem1_ARSIZE, k.m_axi_gmem1_ARBURST}};
    Address writes = {k.m_axi_gmem2_AWVALID, k.m_axi_gmem2_AWREADY, k.m_axi_gmem2_AWADDR,
                      k.m_axi_gmem2_AWLEN, k.m_axi_gmem2_AWSIZE, k.m_axi_gmem2_AWBURST};
    ReadData beats[2] = {
        {k.m_axi_gmem0_RVALID, k.m_axi_gmem0_RREADY, k.m_axi_gmem0_RDATA, k.m_axi_gmem0_RLAST,
         k.m_axi_gmem0_RRESP},
        {k.m_axi_gmem1_RVALID, k.m_axi_gmem1_RREADY, k.m_axi_gmem1_RDATA, k.m_axi_gmem1_RLAST,
         k.m_axi_gmem1_RRESP}};

    if (k.m_axi_gmem0_AWVALID || k.m_axi_gmem0_WVALID || k.m_axi_gmem1_AWVALID
        || k.m_axi_gmem1_WVALID || k.m_axi_gmem2_ARVALID)
        outcome.violations |= UNUSED_CHANNEL;

    // Who may have the data bus.
    bool refresh = memory.refreshes(now_);
    outcome.refresh += refresh;
    bool grant[3];
    bool wants[3] = {offered_[0] || (memory.has_beat(0, now_) && !memory.stalls(1)),
                     offered_[1] || (memory.has_beat(1, now_) && !memory.stalls(1)),
                     k.m_axi_gmem2_WVALID && memory.expects_data() && !memory.stalls_data()};
    for (int i = 0; i < 3; i++) grant[i] = wants[i] && !refresh;
    if (shared_) {
        bool taken = false;
        for (int step = 0; step < 3; step++) {
            int who = (turn_ + step) % 3;
            if (grant[who] && taken) grant[who] = false;
            if (grant[who]) taken = true;
        }
        for (int i = 0; i < 3; i++) if (grant[i]) turn_ = (i + 1) % 3;
    }
    for (int port = 0; port < 2; port++) {
        reads[port].ready = memory.accepts_read(port);
        beats[port].valid = grant[port];
        if (grant[port]) {
            bool last;
            int response;
            memory.offer(port, beats[port].data.data(), last, response);
            beats[port].last = last;
            beats[port].response = response;
        }
    }
    writes.ready = memory.accepts_write();
    k.m_axi_gmem2_WREADY = grant[2];
    bool answers = answer_offered_ || memory.has_answer(now_);
    k.m_axi_gmem2_BVALID = answers;
    if (answers) {
        k.m_axi_gmem2_BRESP = memory.answer();
        answer_offered_ = true;
    }
    settle();

    check_stable(outcome);
    for (int port = 0; port < 2; port++) {
        if (reads[port].valid && reads[port].ready) {
            check_burst(reads[port], outcome);
            memory.read(port, reads[port].address, reads[port].length + 1u, now_ + 1);
        }
        offered_[port] = beats[port].valid && !beats[port].ready;
        if (offered_[port]) outcome.violations |= NOT_READY;
        if (beats[port].valid && beats[port].ready) memory.beat_taken(port);
    }
    // Data first: the memory takes a burst's data only after its address.
    if (k.m_axi_gmem2_WVALID && k.m_axi_gmem2_WREADY) {
        if (~k.m_axi_gmem2_WSTRB) outcome.violations |= BAD_ATTRIBUTES;
        if (!memory.data(k.m_axi_gmem2_WDATA.data(), k.m_axi_gmem2_WLAST, now_ + 1))
            outcome.violations |= BAD_LAST;
    }
    if (writes.valid && writes.ready) {
        check_burst(writes, outcome);
        memory.write(writes.address, writes.length + 1u);
    }
    if (answers && k.m_axi_gmem2_BREADY) {
        memory.answer_taken();
        answer_offered_ = false;
    }
    edge();
}

void Session::check_stable(Outcome& outcome) {
    Vkernel& k = kernel_;
    struct { bool valid, ready; uint64_t address; uint32_t length; } channels[3] = {
        {(bool)k.m_axi_gmem0_ARVALID, (bool)k.m_axi_gmem0_ARREADY, k.m_axi_gmem0_ARADDR,
         k.m_axi_gmem0_ARLEN},
        {(bool)k.m_axi_gmem1_ARVALID, (bool)k.m_axi_gmem1_ARREADY, k.m_axi_gmem1_ARADDR,
         k.m_axi_gmem1_ARLEN},
        {(bool)k.m_axi_gmem2_AWVALID, (bool)k.m_axi_gmem2_AWREADY, k.m_axi_gmem2_AWADDR,
         k.m_axi_gmem2_AWLEN}};
    for (int i = 0; i < 3; i++) {
        Pending& pending = pending_[i];
        if (pending.waits
            && (!channels[i].valid || channels[i].address != pending.address
                || channels[i].length != pending.length))
            outcome.violations |= UNSTABLE;
        pending = {channels[i].valid && !channels[i].ready, channels[i].address,
                   channels[i].length};
    }
    if (word_waits_
        && (!k.m_axi_gmem2_WVALID || (bool)k.m_axi_gmem2_WLAST != word_last_
            || memcmp(word_, k.m_axi_gmem2_WDATA.data(), BEAT)))
        outcome.violations |= UNSTABLE;
    word_waits_ = k.m_axi_gmem2_WVALID && !k.m_axi_gmem2_WREADY;
    word_last_ = k.m_axi_gmem2_WLAST;
    if (word_waits_) memcpy(word_, k.m_axi_gmem2_WDATA.data(), BEAT);
}

void Session::control_write(
    uint32_t offset, uint32_t value, MemoryModel& memory, Outcome& outcome) {
    Vkernel& k = kernel_;
    k.s_axi_control_AWVALID = k.s_axi_control_WVALID = 1;
    k.s_axi_control_AWADDR = offset;
    k.s_axi_control_WDATA = value;
    k.s_axi_control_WSTRB = 15;
    bool answered = false;
    for (int i = 0; i < 64 && !answered; i++) {
        settle();
        bool address = k.s_axi_control_AWVALID && k.s_axi_control_AWREADY;
        bool word = k.s_axi_control_WVALID && k.s_axi_control_WREADY;
        answered = k.s_axi_control_BVALID;
        cycle(memory, outcome);
        if (address) k.s_axi_control_AWVALID = 0;
        if (word) { k.s_axi_control_WVALID = 0; written_at_ = now_; }
    }
    if (!answered) outcome.violations |= CONTROL;
}

uint32_t Session::control_read(uint32_t offset, MemoryModel& memory, Outcome& outcome) {
    Vkernel& k = kernel_;
    k.s_axi_control_ARVALID = 1;
    k.s_axi_control_ARADDR = offset;
    for (int i = 0; i < 64; i++) {
        settle();
        bool address = k.s_axi_control_ARVALID && k.s_axi_control_ARREADY;
        bool answered = k.s_axi_control_RVALID;
        uint32_t value = k.s_axi_control_RDATA;
        cycle(memory, outcome);
        if (address) k.s_axi_control_ARVALID = 0;
        if (answered) return value;
    }
    outcome.violations |= CONTROL;
    return 0;
}

void Session::attach(const Launch& launch) {
    launch_ = launch;
    shared_ = launch.memory.shared_bus;
    attached_ = std::make_unique<MemoryModel>(launch_, outcome_);
    reset();
    fresh_ = false;
}

void Session::run(const Launch& launch, Outcome& outcome) {
    memset(&outcome, 0, sizeof outcome);
    MemoryModel memory(launch, outcome);
    shared_ = launch.memory.shared_bus;
    if (fresh_) reset();
    fresh_ = false;
    for (uint64_t i = 0; i < launch.register_count; i++) {
        uint32_t offset = launch.registers[2 * i], value = launch.registers[2 * i + 1];
        control_write(offset, value, memory, outcome);
        if (control_read(offset, memory, outcome) != value) outcome.violations |= CONTROL;
    }
    if (!(control_read(0x00, memory, outcome) & 4)) outcome.violations |= CONTROL;  // ap_idle
    control_write(0x04, 1, memory, outcome);
    control_write(0x08, 1, memory, outcome);
    outcome.refresh = 0;
    // The refresh of every launch starts at the same place: results do not depend on history.
    now_ = launch.memory.refresh_period;
    control_write(0x00, 1, memory, outcome);
    uint64_t start = written_at_;
    while (!kernel_.__SYM__interrupt && now_ - start < launch.max_cycles) {
        if (launch.reset_at && now_ - start >= launch.reset_at) {
            reset();
            outcome.ended = 2;
            return;
        }
        cycle(memory, outcome);
    }
    outcome.cycles = now_ - start;
    if (!kernel_.__SYM__interrupt) {
        reset();
        return;
    }
    outcome.ended = 1;
    if (memory.anything_open()) outcome.violations |= OPEN_AT_END;
    uint32_t status = control_read(0x00, memory, outcome);
    if (!(status & 2) || !(status & 0x200)) outcome.violations |= CONTROL;  // ap_done, interrupt
    control_write(0x0c, 1, memory, outcome);
    if (kernel_.__SYM__interrupt) outcome.violations |= CONTROL;
    control_write(0x00, 0x10, memory, outcome);
    cycle(memory, outcome);
    status = control_read(0x00, memory, outcome);
    if ((status & 2) || !(status & 4)) outcome.violations |= CONTROL;
}

}  // namespace

extern "C" {
void* session_new() { return new Session; }
void session_free(void* session) { delete static_cast<Session*>(session); }
void session_run(void* session, const Launch* launch, Outcome* outcome) {
    static_cast<Session*>(session)->run(*launch, *outcome);
}
void session_attach(void* session, const Launch* launch) {
    static_cast<Session*>(session)->attach(*launch);
}
uint32_t session_read(void* session, uint32_t offset) {
    return static_cast<Session*>(session)->read(offset);
}
void session_write(void* session, uint32_t offset, uint32_t value) {
    static_cast<Session*>(session)->write(offset, value);
}
void session_cycles(void* session, uint64_t count) {
    static_cast<Session*>(session)->cycles(count);
}
uint64_t session_now(void* session) { return static_cast<Session*>(session)->now(); }
void session_outcome(void* session, Outcome* outcome) {
    *outcome = static_cast<Session*>(session)->so_far();
}
}
double sc_time_stamp() { return 0; }
