// SPDX-License-Identifier: Apache-2.0
// The system's libcrypto, found when it is first needed; its functions are declared by who calls
// them, so that a build needs no headers of it.
#pragma once
#include <dlfcn.h>

namespace hillinfer {

// Null where there is none. Only the version whose functions are declared is tried, and it is
// never closed: what it keeps for its threads must outlive them.
inline void* libcrypto() { return dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL); }

// Whether a library has a function, which is then taken.
template <class Function>
bool take(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

}  // namespace hillinfer
