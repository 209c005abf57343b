// Threads that run one function together: one parallel region for a whole forward, with barriers inside.
//
// On a busy machine a thread loses its core for milliseconds, and at the next barrier all others wait for it. A run that
// spends its time in such waits goes on with half of its team; so do the next runs, until a trial with all goes well.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace outpace {

// The part [begin, end) of `total` units that falls to one of `count`.
struct Part {
    int begin, end;
};
inline Part part_of(int total, int rank, int count) {
    return {static_cast<int>(static_cast<long long>(total) * rank / count),
            static_cast<int>(static_cast<long long>(total) * (rank + 1) / count)};
}

// A thread's place in a run: `id` names its own buffers and stays; `rank` of `count` says which share of the work is
// its own, and may change at a barrier.
struct Seat {
    int id, rank, count;
    Part of(int total) const { return part_of(total, rank, count); }
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return threads_; }
    int team() const { return rest_ > 0 ? limit_ : threads_; }  // threads that the next run starts with

    // Runs body(seat) on every thread of the team and returns with how many it ended; the caller is thread 0. `body` must
    // not throw. Not reentrant.
    int run(const std::function<void(Seat&)>& body);

    // All threads of a run wait here for one another. False: this thread is dismissed. It must return from `body` at once
    // and touch nothing of the run, which may be over.
    bool meet(Seat& seat);

private:
    using Clock = std::chrono::steady_clock;
    struct alignas(64) Place {
        std::atomic<unsigned> invited{0};  // the run that the thread is, or was last, asked to join
        std::atomic<bool> dismissed{false};  // set while the thread waits at a barrier, cleared by itself
        int rank = 0;                        // -1: not of the team
    };

    void close();
    void work(int thread);
    bool take_part(int thread);  // false: dismissed
    template <class Done>
    void wait(const Done& done, bool lost = true);
    void account();
    bool slow() const;
    void shrink(const Seat& last);
    void learn(int started);

    const int threads_;
    std::vector<Place> places_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, met_;
    bool closing_ = false;
    // The run's: set by the caller before it starts, later only by a barrier's last thread while the others wait.
    const std::function<void(Seat&)>* body_ = nullptr;
    unsigned runs_ = 0;
    int count_ = 1;
    Clock::time_point begun_;
    Clock::duration lost_{};          // in waits that ended in sleep
    Clock::time_point asleep_since_;  // when the first sleeper began to wait; zero: nobody sleeps; guarded by mutex_
    // From run to run.
    int limit_;         // threads of a run that is no trial
    int rest_ = 0;      // runs until the next trial
    int patience_ = 1;  // how many runs a failed trial is remembered
    // Each on its own cache line: they are written while others spin on them.
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<int> inside_{0};  // threads of the team that have not finished
};

}  // namespace outpace
