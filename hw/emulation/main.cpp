// SPDX-License-Identifier: Apache-2.0
// The process that plays the card behind XRT's hw_emu: XRT's driver starts it through simulate.sh in
// the folder it unpacked from the xclbin, listens on two sockets, and makes one call at a time.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>

#include "device.h"
#include "socket_stream.h"

namespace {

constexpr double PATIENCE = 60;  // seconds in which the driver makes its sockets
constexpr int IDLE_MILLISECONDS = 1000;
constexpr uint32_t CLOSE = 1;

// Fields 1 (fixed 64 bit) and 2 (fixed 32 bit) of the driver's packet header.
constexpr size_t HEADER = 14;
constexpr char SIZE_FIELD = 0x09, CALL_FIELD = 0x15;

std::string header(uint64_t size) {
    std::string bytes(1, SIZE_FIELD);
    bytes.append((const char*)&size, sizeof size);
    return bytes;
}

std::string required(const char* name) {
    const char* value = getenv(name);
    if (!value) throw std::runtime_error(std::string(name) + " is not set: XRT starts this process");
    return value;
}

void serve() {
    std::string folder = "/tmp/" + std::string(getenv("USER") ? getenv("USER") : "");
    std::string id = required("EMULATION_SOCKETID");
    SocketStream calls(folder + "/" + id, PATIENCE);
    // The driver's path to host memory; connected even where no kernel uses it, as its end waits.
    SocketStream host(folder + "/D2X_unix_sock_" + id, PATIENCE);
    Device device("device.conf");
    while (!device.closed()) {
        bool busy = device.advance();
        if (!calls.ready(busy ? 0 : IDLE_MILLISECONDS)) continue;
        std::string head = calls.read(HEADER);
        uint64_t size;
        uint32_t call;
        memcpy(&size, &head[1], sizeof size);
        memcpy(&call, &head[10], sizeof call);
        if (head[0] != SIZE_FIELD || head[9] != CALL_FIELD)
            throw std::runtime_error("a header that no driver sends");
        std::string reply = device.answer(call, calls.read(size));
        if (device.closed()) {
            // A line per card that was let go: what its kernels did. Before whoever let it go hears
            // of it, who may end this process then.
            if (const char* path = getenv("HILLINFER_EMULATION_LOG"))
                std::ofstream(path, std::ios::app) << device.summary() << "\n";
            std::string end = header(0);
            end.push_back(CALL_FIELD);
            end.append((const char*)&CLOSE, sizeof CLOSE);
            host.write(end);
        }
        calls.write(header(reply.size()));
        calls.write(reply);
    }
}

}  // namespace

int main() {
    try {
        serve();
        return 0;
    } catch (const std::exception& error) {
        // The driver sends this process's output to nowhere; its parent reads the file.
        std::ofstream("device.log") << error.what() << "\n";
        return 1;
    }
}
