// A few threads that run numbered tasks together with the caller, and sleep otherwise.
//
// Not OpenMP: torch brings a libgomp of its own, and a second one in the process would keep a second set of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace pdd::attention {

// Owner: one thread calls run() at a time.
class Pool {
  public:
    using Task = void (*)(void* context, int task, int thread);

    explicit Pool(int num_threads) {
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { work(i); });
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

    // Runs task(context, 0 .. num_tasks - 1, thread), each once, in any order; returns when all are done.
    void run(int num_tasks, Task task, void* context) {
        if (threads_.empty() || num_tasks == 1) {
            for (int i = 0; i < num_tasks; ++i) task(context, i, 0);
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            task_ = task, context_ = context, num_tasks_ = num_tasks;
            next_ = 0;
            busy_ = static_cast<int>(threads_.size());
            ++round_;
        }
        wake_.notify_all();
        take(0);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
    }

  private:
    void take(int thread) {
        for (int i = next_.fetch_add(1); i < num_tasks_; i = next_.fetch_add(1)) task_(context_, i, thread);
    }

    void work(int thread) {
        unsigned seen = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            if (stopping_) return;
            seen = round_;
            lock.unlock();
            take(thread);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;  // guards everything but next_
    std::condition_variable wake_, done_;
    Task task_ = nullptr;
    void* context_ = nullptr;
    int num_tasks_ = 0, busy_ = 0;
    unsigned round_ = 0;
    bool stopping_ = false;
    std::atomic<int> next_{0};
    std::vector<std::thread> threads_;  // last: they use what is above
};

}  // namespace pdd::attention
