// Threads of the ops. Work is cut into tasks that compute whole results of their own, so neither the number of
// threads nor who takes which task can change a bit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pd {

class Pool {
  public:
    static Pool& instance() {
        static Pool pool;
        return pool;
    }

    int size() const { return 1 + (int)workers_.size(); }

    // Not while an op runs.
    void resize(int num_threads) {
        stop();
        stopping_ = false;
        // Each begins after the rounds that were before it: one more round than `run` counts would end another too early.
        const unsigned seen = generation_.load();
        for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, seen] { work(seen); });
    }

    // task(i) for i in [0, count), each once, on any thread; returns when all are done. One caller at a time has the
    // workers; a second one meanwhile computes alone.
    template <class Task>
    void run(long count, Task&& task) {
        std::unique_lock<std::mutex> caller(caller_, std::defer_lock);
        if (workers_.empty() || count < 2 || !caller.try_lock()) {
            for (long i = 0; i < count; i++) task(i);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = std::ref(task);
            count_ = count;
            next_ = 0;
            active_ = (int)workers_.size();
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (long i; (i = next_.fetch_add(1)) < count;) task(i);
        for (int i = 0; active_.load(std::memory_order_acquire) != 0; i++)
            if (i < SPINS) pause();
            else std::this_thread::yield();
    }

    ~Pool() { stop(); }

  private:
    static constexpr int SPINS = 2000;  // some ten microseconds: ops follow each other closely

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void work(unsigned seen) {
        for (;;) {
            for (int i = 0; i < SPINS && generation_.load(std::memory_order_acquire) == seen; i++) pause();
            if (generation_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
            }
            seen = generation_.load(std::memory_order_acquire);
            if (stopping_) return;
            for (long i; (i = next_.fetch_add(1)) < count_;) task_(i);
            active_.fetch_sub(1, std::memory_order_release);
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_, caller_;
    std::condition_variable wake_;
    std::function<void(long)> task_;
    long count_ = 0;
    std::atomic<long> next_{0};
    std::atomic<int> active_{0};
    std::atomic<unsigned> generation_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace pd
