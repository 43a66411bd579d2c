// SPDX-License-Identifier: Apache-2.0
#include "prefix_keys.h"

#include <cstddef>

#include "api.h"
#include "libcrypto.h"

namespace hillinfer {
namespace {

struct Digests {
    void* (*context_new)() = nullptr;
    void (*context_free)(void*) = nullptr;
    int (*init)(void*, const void*, void*) = nullptr;
    int (*update)(void*, const void*, size_t) = nullptr;
    int (*finish)(void*, uint8_t*, unsigned*) = nullptr;
    const void* sha256 = nullptr;

    Digests() {
        void* library = libcrypto();
        void* (*fetch)(void*, const char*, const char*) = nullptr;
        if (library && take(library, "EVP_MD_CTX_new", context_new) &&
            take(library, "EVP_MD_CTX_free", context_free) &&
            take(library, "EVP_DigestInit_ex", init) &&
            take(library, "EVP_DigestUpdate", update) &&
            take(library, "EVP_DigestFinal_ex", finish) && take(library, "EVP_MD_fetch", fetch)) {
            // Once: looking it up by its name takes longer than hashing a group.
            sha256 = fetch(nullptr, "SHA256", nullptr);
        }
    }
};

const Digests& digests() {
    static const Digests found;
    return found;
}

}  // namespace

int32_t prefix_keys(const uint8_t* before, const uint8_t* groups, int64_t group_bytes,
                    int64_t count, uint8_t* keys) {
    const Digests& library = digests();
    void* const context = library.sha256 ? library.context_new() : nullptr;
    if (!context) {
        return -1;
    }
    int64_t done = 0;
    while (done < count && library.init(context, library.sha256, nullptr) == 1 &&
           library.update(context, before, kKeyBytes) == 1 &&
           library.update(context, groups + done * group_bytes, size_t(group_bytes)) == 1 &&
           library.finish(context, keys + done * kKeyBytes, nullptr) == 1) {
        before = keys + done * kKeyBytes;
        ++done;
    }
    library.context_free(context);
    return done == count ? 1 : -1;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_prefix_keys(const uint8_t* before, const uint8_t* groups,
                                            int64_t group_bytes, int64_t count, uint8_t* keys) {
    return hillinfer::prefix_keys(before, groups, group_bytes, count, keys);
}
