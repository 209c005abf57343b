// What models that compute in turn share: threads, working memory, and the lock that lets one of them at a time.
#pragma once

#include <memory>
#include <mutex>

#include "runtime/pool.h"
#include "runtime/scratch.h"

namespace outpace {

// A process that forks waits until no forward is under way, so that a child finds every model whole. The child has none
// of the threads; it gets its own when it first computes.
class Runtime {
public:
    explicit Runtime(int threads);  // fewer where the system gives no more
    ~Runtime();
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    int threads() const { return threads_; }
    // Held while anything below, or the cache of a model that runs here, is used.
    std::mutex& lock() { return lock_; }
    Pool& pool();
    Scratch& scratch() { return scratch_; }

private:
    friend struct Forks;
    void forget_threads();

    std::mutex lock_;
    std::unique_ptr<Pool> pool_;
    const int threads_;  // that were started; a forked child may have got fewer
    bool forked_ = false;  // the pool's threads are another process's
    Scratch scratch_;
};

}  // namespace outpace
