#include "pool.h"

#include <chrono>

namespace outpace {
namespace {

// A decode loop comes back within this time, so the next forward finds its workers awake; an idle model does not burn a
// core that torch or the caller could use.
constexpr auto kSpin = std::chrono::microseconds(200);
// A barrier's wait is short unless a thread was descheduled. Then sleeping beats spinning: a sleeper is let back in
// ahead of whoever else is using the core, a spinner has used its turn up.
constexpr int kSpinsBeforeSleep = 1024;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& body) {
    if (threads_ > 1) {
        body_ = &body;
        epoch_.fetch_add(1);  // sequentially consistent, as is sleeping_: a worker sees the epoch or we see it asleep
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }
    body(0);
    barrier();  // nobody may still be inside `body` when it goes out of scope
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);  // sequentially consistent, as is waiting_: see run
        if (waiting_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            met_.notify_all();
        }
        return;
    }
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (phase_.load(std::memory_order_acquire) != phase) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.fetch_add(1);
    met_.wait(lock, [&] { return phase_.load() != phase; });
    waiting_.fetch_sub(1);
}

void Pool::work(int thread) {
    unsigned seen = 0;
    for (;;) {
        const auto start = std::chrono::steady_clock::now();
        for (int spins = 1; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
            relax();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() - start > kSpin) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != seen; });
                sleeping_.fetch_sub(1);
            }
        }
        ++seen;
        if (closing_) return;  // written before the epoch that we have just acquired
        (*body_)(thread);
        barrier();
    }
}

}  // namespace outpace
