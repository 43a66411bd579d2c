// SPDX-License-Identifier: Apache-2.0
// A shared library that is loaded by its path, with names of its own.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

class SharedLibrary {
public:
    explicit SharedLibrary(const std::string& path)
        : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!handle_) throw std::runtime_error(dlerror());
    }
    SharedLibrary(const SharedLibrary&) = delete;
    SharedLibrary& operator=(const SharedLibrary&) = delete;
    // A Verilated model's threads may outlive its objects: the library stays loaded.
    ~SharedLibrary() = default;

    template <typename Function>
    Function* find(const std::string& name) const {
        void* found = dlsym(handle_, name.c_str());
        if (!found) throw std::runtime_error("the library has no " + name);
        return reinterpret_cast<Function*>(found);
    }

private:
    void* handle_;
};
