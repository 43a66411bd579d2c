// SPDX-License-Identifier: Apache-2.0
#include "page_cipher.h"

#include <new>

#include "api.h"
#include "libcrypto.h"

namespace hillinfer {
namespace {

constexpr int64_t kPageBytes = kSealedPageBytes, kTagBytes = 16;
constexpr int kNonceBytes = 12, kNumberBytes = 8;
// OpenSSL's EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG.
constexpr int kGetTag = 0x10, kSetTag = 0x11;
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
        void* library = libcrypto();
        is_there = library && take(library, "EVP_CIPHER_CTX_new", context_new) &&
                   take(library, "EVP_CIPHER_CTX_free", context_free) &&
                   take(library, "EVP_aes_256_gcm", aes_256_gcm) &&
                   take(library, "EVP_CipherInit_ex", init) &&
                   take(library, "EVP_CipherUpdate", update) &&
                   take(library, "EVP_CipherFinal_ex", finish) &&
                   take(library, "EVP_CIPHER_CTX_ctrl", control);
    }
};

const Crypto& crypto() {
    static const Crypto found;
    return found;
}

// Gives a context its cipher and key; the nonce changes with each page.
bool keyed(void* context, const uint8_t* key, int32_t seals) {
    return context && crypto().init(context, crypto().aes_256_gcm(), nullptr, key, nullptr, seals) == 1;
}

// Seals or opens a page in its place.
bool pass_page(void* context, uint64_t number, uint32_t writes, uint8_t* page, uint8_t* tag,
               int32_t seals) {
    uint8_t nonce[kNonceBytes];
    for (int i = 0; i < kNumberBytes; ++i) {
        nonce[kNonceBytes - 1 - i] = uint8_t(number >> 8 * i);
    }
    for (int i = 0; i < kNonceBytes - kNumberBytes; ++i) {
        nonce[kNonceBytes - kNumberBytes - 1 - i] = uint8_t(writes >> 8 * i);
    }
    const Crypto& library = crypto();
    int size = 0;
    return library.init(context, nullptr, nullptr, nullptr, nonce, seals) == 1 &&
           (seals || library.control(context, kSetTag, kTagBytes, tag) == 1) &&
           library.update(context, page, &size, page, kPageBytes) == 1 && size == kPageBytes &&
           library.finish(context, page + kPageBytes, &size) == 1 &&
           (!seals || library.control(context, kGetTag, kTagBytes, tag) == 1);
}

}  // namespace

bool has_page_cipher() { return crypto().is_there; }

int64_t cipher_pages(const PageRun& run) {
    if (!crypto().is_there) {
        return -1;
    }
    void* const context = crypto().context_new();
    int64_t done = keyed(context, run.key, run.seals) ? 0 : -1;
    while (done >= 0 && done < run.count &&
           pass_page(context, uint64_t(run.first + done), run.writes ? run.writes[done] : 0,
                     run.pages + done * kPageBytes, run.tags + done * kTagBytes, run.seals)) {
        ++done;
    }
    if (context) {
        crypto().context_free(context);
    }
    return done;
}

PageOpener::~PageOpener() {
    if (context_) {
        crypto().context_free(context_);
    }
}

bool PageOpener::open(const PageSeal& seal, int64_t index, uint8_t* page) noexcept {
    if (!crypto().is_there) {
        return false;
    }
    if (!context_) {
        context_ = crypto().context_new();
    }
    if (key_ != seal.key) {
        key_ = nullptr;
        if (!keyed(context_, seal.key, 0)) {
            return false;
        }
        key_ = seal.key;
    }
    // The library takes a tag that it may write to, and does so where it seals.
    return pass_page(context_, uint64_t(seal.first + index), seal.writes ? seal.writes[index] : 0,
                     page, const_cast<uint8_t*>(seal.tags) + index * kTagBytes, 0);
}

PageOpeners::~PageOpeners() {
    while (idle_) {
        PageOpener* const next = idle_->next;
        delete idle_;
        idle_ = next;
    }
}

PageOpener* PageOpeners::take() noexcept {
    {
        const std::lock_guard<std::mutex> lock(changing_);
        if (idle_) {
            PageOpener* const taken = idle_;
            idle_ = taken->next;
            return taken;
        }
    }
    return new (std::nothrow) PageOpener;
}

void PageOpeners::give(PageOpener* opener) noexcept {
    const std::lock_guard<std::mutex> lock(changing_);
    opener->next = idle_;
    idle_ = opener;
}

}  // namespace hillinfer

HILLINFER_API int32_t hillinfer_has_page_cipher() { return hillinfer::has_page_cipher(); }

HILLINFER_API int64_t hillinfer_cipher_pages(const hillinfer::PageRun* run) {
    return hillinfer::cipher_pages(*run);
}
