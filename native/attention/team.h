// A few threads that run one loop together: the caller is member 0. Between loops they sleep, so that a rank that waits for
// its next step uses no CPU. Not a thread pool: one loop at a time, from one caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pdd::attention {

class Team {
public:
    explicit Team(int size) {
        for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { follow(member); });
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;
    ~Team() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
            ++round_;
        }
        begin_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls body(member) once on every member and returns when all are done.
    void run(const std::function<void(int)>& body) {
        body_ = &body;
        left_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
        {
            const std::lock_guard lock(mutex_);
            ++round_;
        }
        begin_.notify_all();
        body(0);
        std::unique_lock lock(mutex_);
        end_.wait(lock, [this] { return left_.load(std::memory_order_acquire) == 0; });
    }

private:
    void follow(int member) {
        std::uint64_t seen = 0;
        for (;;) {
            {
                std::unique_lock lock(mutex_);
                begin_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (stop_) return;
            }
            (*body_)(member);
            if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                const std::lock_guard lock(mutex_); // pairs with the wait in run()
                end_.notify_one();
            }
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable begin_, end_;
    std::uint64_t round_ = 0; // guarded by mutex_
    bool stop_ = false;       // guarded by mutex_
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<int> left_{0};
};

} // namespace pdd::attention
