// Threads that run one function together: one parallel region for a whole forward, with barriers inside.
//
// A thread that waits spins first, for several times the cost of a wake from sleep, which each pool measures when it begins.
//
// Where other processes use the cores, a thread may lose its core for milliseconds, and all others wait for it. A run counts as
// such if waits that ended in sleep took much of its time and threads of its team meanwhile had no processor though they did
// not sleep. It goes on with half of its team, and so do the next runs of its kind, until a trial with all threads is faster
// than the smaller team. Slow barriers alone never shrink the team.
#pragma once

#include <array>
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
    static constexpr unsigned kSampling = 8, kDrafting = 9;  // kinds of runs of their own; forwards have those below

    explicit Pool(int threads);  // fewer where the system gives no more, at the least the caller's own
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return threads_; }
    int team(unsigned kind = 0) const { return teams_[kind].rest > 0 ? teams_[kind].limit : threads_; }  // that its next run starts with
    double wake_seconds() const { return wake_seconds_; }          // a run of threads that sleep; 0 with one thread
    bool uneven() const { return uneven_; }  // whether a processor is slower than another, measured when the threads began
    void treat_as_uneven(bool uneven) { uneven_ = uneven; }
    double hand_over_seconds() const { return hand_over_seconds_; }  // and of threads that spin
    long long dropped() const { return dropped_; }  // runs that went on with fewer threads, since others used the cores
    long long waited() const { return waited_; }    // slow runs that kept their team, since nobody did
    // For tests: what a run goes by, whatever clocks say: time that threads were away, as a multiple of what was lost, and what was
    // lost, of the whole run. Negative: the truth.
    void pretend(double away, double lost) { pretended_away_ = away, pretended_lost_ = lost; }

    // Runs body(seat) on every thread of the team and returns with how many it ended; the caller is thread 0. `body` must
    // not throw. Teams are compared by runs of one `kind`, which take a time in proportion to `work`. Not reentrant.
    int run(const std::function<void(Seat&)>& body, unsigned kind = 0, double work = 1.0);

    // All threads of a run wait here for one another. False: this thread is dismissed. It must return from `body` at once
    // and touch nothing of the run, which may be over.
    bool meet(Seat& seat);

private:
    using Clock = std::chrono::steady_clock;
    struct alignas(64) Place {
        std::atomic<unsigned> invited{0};  // the run that the thread is, or was last, asked to join
        std::atomic<bool> dismissed{false};  // set while the thread waits at a barrier, cleared by itself
        int rank = -1;                       // -1: not of the team
        std::atomic<int> thread{0};          // the system's number of it; 0: unknown, or the caller's own
        // Of the run: processor time at its begin, time asleep, time away as the thread last told. Written by the thread
        // alone; once it is about to sleep, under mutex_.
        Clock::duration used{}, slept{}, away{};
    };

    static constexpr unsigned kKinds = kDrafting + 1;

    void close();
    void calibrate();
    bool differ();
    void keep_apart();
    void work(int thread);
    void compute(Seat& seat) const;  // sampling in the caller's own mode, since Python samples, too; all else in the kernels'
    bool take_part(int thread);  // false: dismissed
    template <class Done>
    void wait(int thread, const Done& done, bool lost = true);
    Clock::duration away(const Place& place) const;
    void account();
    double expected(int team, unsigned kind) const;
    bool slow() const;
    bool robbed() const;
    void shrink(const Seat& last);
    void learn(int started, unsigned kind, double work);

    int threads_;
    std::vector<Place> places_;  // one for each thread that was asked for
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, met_;
    bool closing_ = false;
    // The run's: set by the caller before it starts, later only by a barrier's last thread while the others wait.
    const std::function<void(Seat&)>* body_ = nullptr;
    unsigned kind_ = 0;
    unsigned runs_ = 0;
    int count_ = 1;
    Clock::time_point begun_, ended_;
    Clock::duration expected_{};      // of the whole run, undisturbed; 0: unknown
    Clock::duration lost_{};          // in waits that ended in sleep
    Clock::time_point asleep_since_;  // when the first sleeper began to wait; zero: nobody sleeps; guarded by mutex_
    Clock::time_point released_;      // when sleepers were last told to go on; guarded by mutex_
    Clock::duration away_{};          // of all threads that began the run
    int began_ = 1;                   // how many
    // From run to run.
    const int processors_;  // that this process may use
    int callers_ = -1;      // the one that workers are kept off
    struct Team {  // that runs of a kind have
        int limit = 1;     // threads of a run that is no trial
        int rest = 0;      // runs until the next trial
        int patience = 1;  // how many runs a failed trial is remembered
        double smaller = 0.0, usual = 0.0;  // seconds a unit of work, of the smaller team and of all threads undisturbed; 0: unknown
    };
    std::array<Team, kKinds> teams_;
    Clock::duration gap_{};                          // between runs that follow one another
    Clock::duration spin_;                           // of a thread that waits at a barrier
    std::atomic<Clock::rep> idle_spin_;              // of a worker between runs
    bool calibrated_ = false, uneven_ = false;
    long long dropped_ = 0, waited_ = 0;
    double pretended_away_ = -1.0, pretended_lost_ = -1.0;
    double wake_seconds_ = 0.0, hand_over_seconds_ = 0.0;
    // Each on its own cache line: they are written while others spin on them.
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<int> inside_{0};  // threads of the team that have not finished
};

}  // namespace outpace
