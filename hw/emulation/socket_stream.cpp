// SPDX-License-Identifier: Apache-2.0
#include "socket_stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

SocketStream::SocketStream(const std::string& path, double seconds) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path)
        throw std::runtime_error("the socket's path is too long: " + path);
    memcpy(address.sun_path, path.c_str(), path.size());
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
        socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (socket_ < 0) throw std::runtime_error(std::string("no socket: ") + strerror(errno));
        if (!::connect(socket_, (const sockaddr*)&address, sizeof address)) return;
        ::close(socket_);
        if (std::chrono::steady_clock::now() > until)
            throw std::runtime_error("nobody listens at " + path + ": " + strerror(errno));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

SocketStream::~SocketStream() { ::close(socket_); }

bool SocketStream::ready(int milliseconds) const {
    pollfd waits{socket_, POLLIN, 0};
    return ::poll(&waits, 1, milliseconds) > 0;
}

std::string SocketStream::read(size_t bytes) {
    std::string content(bytes, '\0');
    size_t have = 0;
    while (have < bytes) {
        ssize_t got = ::recv(socket_, &content[have], bytes - have, 0);
        if (got == 0) throw std::runtime_error("the driver has closed its socket");
        if (got < 0 && errno != EINTR) throw std::runtime_error(strerror(errno));
        if (got > 0) have += (size_t)got;
    }
    return content;
}

void SocketStream::write(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
        ssize_t put = ::send(socket_, &bytes[sent], bytes.size() - sent, MSG_NOSIGNAL);
        if (put < 0 && errno != EINTR) throw std::runtime_error(strerror(errno));
        if (put > 0) sent += (size_t)put;
    }
}
