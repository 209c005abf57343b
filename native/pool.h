// Threads that run one function together: one parallel region for a whole forward, with barriers inside.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace outpace {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return threads_; }

    // Runs body(thread) on every thread; the caller is thread 0. `body` must not throw. Not reentrant.
    void run(const std::function<void(int)>& body);

    // All threads of a run wait here for one another.
    void barrier();

private:
    void work(int thread);

    const int threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* body_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_, met_;
    bool closing_ = false;
    // Each on its own cache line: they are written while others spin on them.
    alignas(64) std::atomic<unsigned> epoch_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<int> waiting_{0};
};

// The part [begin, end) of `total` units that falls to `thread` of `threads`.
struct Part {
    int begin, end;
};
inline Part part_of(int total, int thread, int threads) {
    return {static_cast<int>(static_cast<long long>(total) * thread / threads),
            static_cast<int>(static_cast<long long>(total) * (thread + 1) / threads)};
}

}  // namespace outpace
