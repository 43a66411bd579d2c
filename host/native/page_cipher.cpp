// SPDX-License-Identifier: Apache-2.0
#include "page_cipher.h"

#include <dlfcn.h>

#include "api.h"

namespace hillinfer {
namespace {

constexpr int64_t kPageBytes = 4096, kTagBytes = 16;
constexpr int kNonceBytes = 12;
// OpenSSL's EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG.
constexpr int kGetTag = 0x10, kSetTag = 0x11;
// The version whose functions are declared below; another one is not tried.
constexpr const char* kLibrary = "libcrypto.so.3";

// What is used of it, declared here so that a build needs no headers of it.
struct Crypto {
    void* (*context_new)() = nullptr;
    void (*context_free)(void*) = nullptr;
    const void* (*aes_256_gcm)() = nullptr;
    int (*init)(void*, const void*, void*, const uint8_t*, const uint8_t*, int) = nullptr;
    int (*update)(void*, uint8_t*, int*, const uint8_t*, int) = nullptr;
    int (*finish)(void*, uint8_t*, int*) = nullptr;
    int (*control)(void*, int, int, void*) = nullptr;
    bool is_there = false;

    Crypto() {
        // Never closed: what it keeps for its threads must outlive them.
        void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
        is_there = library && take(library, "EVP_CIPHER_CTX_new", context_new) &&
                   take(library, "EVP_CIPHER_CTX_free", context_free) &&
                   take(library, "EVP_aes_256_gcm", aes_256_gcm) &&
                   take(library, "EVP_CipherInit_ex", init) &&
                   take(library, "EVP_CipherUpdate", update) &&
                   take(library, "EVP_CipherFinal_ex", finish) &&
                   take(library, "EVP_CIPHER_CTX_ctrl", control);
    }

    template <class Function>
    static bool take(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
};

const Crypto& crypto() {
    static const Crypto found;
    return found;
}

// A cipher with its key; the nonce changes with each page.
class Context {
public:
    Context(const Crypto& library, const uint8_t* key, int32_t seals)
        : library_(library), context_(library.context_new()), seals_(seals) {
        is_ready_ = context_ && library_.init(context_, library_.aes_256_gcm(), nullptr, key,
                                              nullptr, seals_) == 1;
    }
    ~Context() {
        if (context_) {
            library_.context_free(context_);
        }
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    bool is_ready() const { return is_ready_; }

    bool page(uint64_t number, uint8_t* page, uint8_t* tag) {
        uint8_t nonce[kNonceBytes] = {};
        for (int i = 0; i < 8; ++i) {
            nonce[kNonceBytes - 1 - i] = uint8_t(number >> 8 * i);
        }
        int size = 0;
        return library_.init(context_, nullptr, nullptr, nullptr, nonce, seals_) == 1 &&
               (seals_ || library_.control(context_, kSetTag, kTagBytes, tag) == 1) &&
               library_.update(context_, page, &size, page, kPageBytes) == 1 &&
               size == kPageBytes && library_.finish(context_, page + kPageBytes, &size) == 1 &&
               (!seals_ || library_.control(context_, kGetTag, kTagBytes, tag) == 1);
    }

private:
    const Crypto& library_;
    void* context_;
    const int32_t seals_;
    bool is_ready_ = false;
};

}  // namespace

bool has_page_cipher() { return crypto().is_there; }

int64_t cipher_pages(const PageRun& run) {
    if (!crypto().is_there) {
        return -1;
    }
    Context context(crypto(), run.key, run.seals);
    if (!context.is_ready()) {
        return -1;
    }
    for (int64_t i = 0; i < run.count; ++i) {
        if (!context.page(uint64_t(run.first + i), run.pages + i * kPageBytes,
                          run.tags + i * kTagBytes)) {
            return i;
        }
    }
    return run.count;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_has_page_cipher() { return hillinfer::has_page_cipher(); }

HILLINFER_API int64_t hillinfer_cipher_pages(const hillinfer::PageRun* run) {
    return hillinfer::cipher_pages(*run);
}
