// CommandQueue: the bounded ring into the worker, and how a sleeping worker is woken.
//
// Protocol: the worker says it sleeps, looks once more, then blocks on fd(); a producer pushes first and then looks
// whether the worker sleeps. With sequentially consistent flags one of them sees the other, so no wake-up is lost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>

#include "fabric/commands.h"
#include "util/ring.h"
#include "util/unique_fd.h"

namespace pdd {

class CommandQueue {
  public:
    explicit CommandQueue(size_t capacity) : ring_(capacity) {}

    // Any thread but the worker's. Waits while the ring is full; false after `patience`, or when closed.
    bool push(Command command, std::chrono::milliseconds patience) {
        const auto deadline = std::chrono::steady_clock::now() + patience;
        if (closed_.load()) return false;
        while (!ring_.try_push(command)) {
            if (closed_.load() || std::chrono::steady_clock::now() > deadline) return false;
            wake();
            std::this_thread::yield();
        }
        wake();
        return true;
    }
    void wake() {
        if (sleeping_.load() && sleeping_.exchange(false)) fd_.signal();
    }
    void close() {
        closed_.store(true);
        wake();
    }
    bool closed() const { return closed_.load(); }

    // -- the worker's thread
    bool try_pop(Command& out) { return ring_.try_pop(out); }
    // False: something came in the meantime, do not block.
    bool about_to_sleep() {
        sleeping_.store(true);
        if (ring_.empty() && !closed_.load()) return true;
        sleeping_.store(false);
        return false;
    }
    void awake() {
        sleeping_.store(false);
        fd_.clear();
    }
    int fd() const { return fd_.get(); }

  private:
    MpscRing<Command> ring_;
    std::atomic<bool> sleeping_{false};
    std::atomic<bool> closed_{false};
    EventFd fd_;
};

}  // namespace pdd
