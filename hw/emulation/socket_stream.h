// SPDX-License-Identifier: Apache-2.0
// A Unix stream socket to XRT's driver, which listens: whole messages in and out, or an exception.
#pragma once

#include <cstddef>
#include <string>

class SocketStream {
public:
    // Connects to a path, trying again for some seconds: the driver makes it about now.
    SocketStream(const std::string& path, double seconds);
    ~SocketStream();
    SocketStream(const SocketStream&) = delete;
    SocketStream& operator=(const SocketStream&) = delete;

    // Whether something can be read, waiting for up to so many milliseconds.
    bool ready(int milliseconds) const;
    // Reads exactly so many bytes; std::runtime_error where the driver has gone.
    std::string read(size_t bytes);
    void write(const std::string& bytes);

private:
    int socket_;
};
