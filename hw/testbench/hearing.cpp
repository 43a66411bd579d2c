// SPDX-License-Identifier: Apache-2.0
// Hears what libraries say on std::cout, and nothing else: what this process prints otherwise, in
// whichever thread, goes where it went. One who hears at a time; others wait for their turn.
#include <iostream>
#include <mutex>
#include <streambuf>
#include <string>

namespace {

// Processes of a kernel can be threads, and complain at once.
class Heard : public std::streambuf {
  public:
    std::string text;

  protected:
    int overflow(int character) override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (character != traits_type::eof()) text.push_back(char(character));
        return traits_type::not_eof(character);
    }
    std::streamsize xsputn(const char *characters, std::streamsize count) override {
        std::lock_guard<std::mutex> lock(mutex_);
        text.append(characters, size_t(count));
        return count;
    }

  private:
    std::mutex mutex_;
};

std::mutex turn;
// Whether this thread has its turn: an interrupt may come before it got one.
thread_local bool hears = false;
Heard heard;
std::streambuf *usual = nullptr;

}  // namespace

extern "C" void start_hearing() {
    turn.lock();
    hears = true;
    heard.text.clear();
    usual = std::cout.rdbuf(&heard);
}

// Until `stop_hearing`, which the same thread calls.
extern "C" const char *heard_text() { return hears ? heard.text.c_str() : ""; }

extern "C" void stop_hearing() {
    if (!hears) return;
    std::cout.rdbuf(usual);
    hears = false;
    turn.unlock();
}
