// SPDX-License-Identifier: Apache-2.0
#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace {
constexpr uint64_t PAGE = 4096;

std::runtime_error failed(const std::string& what) {
    return std::runtime_error(what + ": " + strerror(errno));
}
}  // namespace

DeviceMemory::DeviceMemory(uint64_t bytes) : size_(bytes) {
    void* window = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (window == MAP_FAILED) throw failed("no window of " + std::to_string(bytes) + " bytes");
    window_ = (uint8_t*)window;
}

DeviceMemory::~DeviceMemory() {
    for (auto& [address, file] : shared_) unlink(file.path.c_str());
    munmap(window_, size_);
}

uint8_t* DeviceMemory::at(uint64_t address, uint64_t bytes) {
    if (address > size_ || bytes > size_ - address)
        throw std::out_of_range(std::to_string(bytes) + " bytes at " + std::to_string(address)
            + " lie outside of the card's memory");
    return window_ + address;
}

std::string DeviceMemory::share(uint64_t address, uint64_t bytes, const std::string& folder) {
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    uint8_t* place = at(address, bytes);
    if (address % PAGE) throw std::out_of_range("a shared buffer starts within a page");
    std::string path = folder + "/p2p_" + std::to_string(made_++);
    int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) throw failed("cannot make " + path);
    bool fits = !ftruncate(file, (off_t)bytes);
    if (fits)
        fits = mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0)
            != MAP_FAILED;
    close(file);
    if (!fits) {
        unlink(path.c_str());
        throw failed("cannot share " + path);
    }
    shared_[address] = {path, bytes};
    return path;
}

void DeviceMemory::release(uint64_t address) {
    auto found = shared_.find(address);
    if (found == shared_.end()) return;
    unlink(found->second.path.c_str());
    void* again = mmap(window_ + address, found->second.bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (again == MAP_FAILED) throw failed("cannot take back a shared buffer");
    shared_.erase(found);
}
