// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "calls.pb.h"
#include "hls_kernel.h"
#include "rtl_kernel.h"

namespace {

constexpr uint64_t REGISTERS = 0x10000;
constexpr uint32_t START = 1;

// Numbers of the driver's calls.
enum Call : uint32_t {
    CLOSE = 1,
    ALLOC = 4,
    FREE = 5,
    COPY_TO = 6,
    COPY_FROM = 7,
    WRITE_RAM = 8,
    WRITE_REGISTERS = 9,
    READ_RAM = 10,
    READ_REGISTERS = 11,
    TIME_STAMP = 17,
    MESSAGES = 19,
    SET_ENVIRONMENT = 20,
};

template <typename Message>
Message parsed(const std::string& payload) {
    Message message;
    if (!message.ParseFromString(payload)) throw std::runtime_error("a call that cannot be read");
    return message;
}

}  // namespace

Device::Device(const std::string& config) {
    const char* folder = getenv("EMULATION_RUN_DIR");
    run_folder_ = folder ? folder : ".";
    std::ifstream file(config);
    if (!file) throw std::runtime_error("cannot read " + config);
    std::string line;
    MemoryTiming timing;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string kind, library, name;
        uint64_t base = 0, bytes = 0;
        int pointers = 0, scalars = 0;
        MemoryTiming told;
        if (!(words >> kind)) continue;
        if (kind == "memory" && words >> bytes && !memory_) {
            memory_ = std::make_unique<DeviceMemory>(bytes);
        } else if (kind == "timing" && kernels_.empty()
                   && words >> told.read_min >> told.read_max >> told.write_min >> told.write_max
                       >> told.shared_bus >> told.refresh_period >> told.refresh_cycles) {
            timing = told;
        } else if (kind == "rtl" && memory_ && words >> base >> library) {
            kernels_.push_back({base, make_rtl_kernel(library, timing, *memory_)});
        } else if (kind == "hls" && memory_
                   && words >> base >> library >> name >> pointers >> scalars) {
            kernels_.push_back(
                {base, make_hls_kernel(library, name, pointers, scalars, *memory_)});
        } else {
            throw std::runtime_error(config + ": cannot read the line '" + line + "'");
        }
    }
    if (kernels_.empty()) throw std::runtime_error(config + " names no kernel");
}

Device::Placed& Device::at(uint64_t address) {
    for (Placed& placed : kernels_)
        if (address >= placed.base && address < placed.base + REGISTERS) return placed;
    throw std::runtime_error("no kernel has registers at " + std::to_string(address));
}

bool Device::advance() {
    bool more = false;
    for (Placed& placed : kernels_) more |= placed.kernel->advance();
    return more;
}

std::string Device::summary() const {
    uint64_t cycles = 0, launches = 0;
    std::string each;
    for (const Placed& placed : kernels_) {
        cycles += placed.kernel->cycles();
        launches += placed.launches;
        each += (each.empty() ? "" : ", ") + std::to_string(placed.launches);
    }
    return "{\"cycles\": " + std::to_string(cycles) + ", \"launches\": "
        + std::to_string(launches) + ", \"kernels\": [" + each + "]}";
}

std::string Device::answer(uint32_t call, const std::string& payload) {
    switch (call) {
        case SET_ENVIRONMENT: {
            calls::Acknowledged reply;
            reply.set_ack(true);
            return reply.SerializeAsString();
        }
        case ALLOC: {
            auto asked = parsed<calls::AllocDeviceBuffer>(payload);
            calls::Allocated reply;
            reply.set_ack(true);
            reply.set_file(asked.peer_to_peer()
                ? memory_->share(asked.address(), asked.size(), run_folder_) : "");
            return reply.SerializeAsString();
        }
        case FREE: {
            auto asked = parsed<calls::FreeDeviceBuffer>(payload);
            memory_->release(asked.address());
            calls::Acknowledged reply;
            reply.set_ack(true);
            return reply.SerializeAsString();
        }
        case COPY_TO: {
            auto asked = parsed<calls::CopyToDevice>(payload);
            uint64_t address = asked.dest() + asked.seek();
            memcpy(memory_->at(address, asked.data().size()), asked.data().data(),
                   asked.data().size());
            calls::CopiedToDevice reply;
            reply.set_size(asked.size());
            return reply.SerializeAsString();
        }
        case COPY_FROM: {
            auto asked = parsed<calls::CopyFromDevice>(payload);
            uint64_t address = asked.source() + asked.skip();
            calls::CopiedFromDevice reply;
            reply.set_size(asked.size());
            reply.set_data(memory_->at(address, asked.size()), asked.size());
            return reply.SerializeAsString();
        }
        case WRITE_RAM:
        case WRITE_REGISTERS: {
            auto asked = parsed<calls::WriteRegisters>(payload);
            for (size_t i = 0; i + 4 <= asked.data().size(); i += 4) {
                uint32_t word;
                memcpy(&word, &asked.data()[i], 4);
                if (call == WRITE_RAM) {
                    memcpy(memory_->at(asked.address() + i, 4), &word, 4);
                } else {
                    Placed& placed = at(asked.address() + i);
                    uint64_t offset = asked.address() + i - placed.base;
                    placed.kernel->write((uint32_t)offset, word);
                    if (!offset && (word & START)) placed.launches++;
                }
            }
            calls::Written reply;
            reply.set_valid(true);
            return reply.SerializeAsString();
        }
        case READ_RAM:
        case READ_REGISTERS: {
            auto asked = parsed<calls::ReadRegisters>(payload);
            std::string data(asked.size(), '\0');
            for (size_t i = 0; i + 4 <= data.size(); i += 4) {
                uint32_t word;
                if (call == READ_RAM) {
                    memcpy(&word, memory_->at(asked.address() + i, 4), 4);
                } else {
                    Placed& placed = at(asked.address() + i);
                    word = placed.kernel->read((uint32_t)(asked.address() + i - placed.base));
                }
                memcpy(&data[i], &word, 4);
            }
            calls::Read reply;
            reply.set_valid(true);
            reply.set_data(data);
            return reply.SerializeAsString();
        }
        case TIME_STAMP: {
            calls::TimeStamp reply;
            uint64_t cycles = 0;
            for (Placed& placed : kernels_) cycles = std::max(cycles, placed.kernel->cycles());
            reply.set_cycles(cycles);
            return reply.SerializeAsString();
        }
        case MESSAGES: return calls::Messages().SerializeAsString();
        case CLOSE: {
            closed_ = true;
            calls::Closed reply;
            reply.set_valid(true);
            return reply.SerializeAsString();
        }
        default: throw std::runtime_error("call " + std::to_string(call) + " is not answered");
    }
}
