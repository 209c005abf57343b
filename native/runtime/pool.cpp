#include "runtime/pool.h"

#include <algorithm>

namespace outpace {
namespace {

using std::chrono::microseconds;

// A decode loop comes back within this time, so the next forward finds its workers awake; an idle model does not burn a
// core that torch or the caller could use.
constexpr auto kSpin = microseconds(200);
// A barrier's wait is short unless a thread was descheduled. Then sleeping beats spinning: a sleeper is let back in
// ahead of whoever else is using the core, a spinner has used its turn up.
constexpr int kSpinsBeforeSleep = 1024;
// A run is slow when waits that ended in sleep took longer than any hiccup, and so much of its time that fewer threads,
// which wait for nobody, would have been as fast.
constexpr auto kHiccup = microseconds(500);
constexpr double kLost = 0.4;
constexpr int kMostPatience = 64;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(std::max(1, threads)), places_(static_cast<size_t>(threads_)), limit_(threads_) {
    try {
        for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system has no more threads: those that began must end before their memory goes
        close();
        throw;
    }
}

Pool::~Pool() { close(); }

void Pool::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        for (Place& place : places_) place.invited.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

int Pool::run(const std::function<void(Seat&)>& body) {
    const int team = this->team();
    if (team > 1) {
        body_ = &body;
        count_ = team;
        begun_ = Clock::now();
        lost_ = {};
        inside_.store(team, std::memory_order_relaxed);
        ++runs_;
        for (int i = 0; i < team; ++i) {
            Place& place = places_[static_cast<size_t>(i)];
            place.rank = i;
            place.invited.store(runs_);  // sequentially consistent, as is sleeping_: a worker sees it or we see it asleep
        }
        for (int i = team; i < threads_; ++i) places_[static_cast<size_t>(i)].rank = -1;
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        const bool stayed = take_part(0);
        wait([this] { return inside_.load() == 0; }, stayed);  // nobody may be at work when `body` goes out of scope
        account();
        learn(team);
        return count_;
    }
    Seat alone{0, 0, 1};
    body(alone);
    if (rest_ > 0) --rest_;
    return 1;
}

bool Pool::take_part(int thread) {
    const Place& place = places_[static_cast<size_t>(thread)];
    Seat seat{thread, place.rank, count_};
    (*body_)(seat);
    if (seat.rank < 0) return false;
    if (inside_.fetch_sub(1) == 1 && waiting_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        met_.notify_all();
    }
    return true;
}

bool Pool::meet(Seat& seat) {
    if (seat.count == 1) return true;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == seat.count - 1) {
        if (waiting_.load() > 0) {
            account();
            if (slow()) shrink(seat);
        }
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);  // sequentially consistent, as is waiting_: see run
        if (waiting_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            asleep_since_ = {};
            met_.notify_all();
        }
    } else {
        wait([&] { return phase_.load() != phase; });
        Place& place = places_[static_cast<size_t>(seat.id)];
        if (place.dismissed.load(std::memory_order_relaxed)) {
            place.dismissed.store(false, std::memory_order_relaxed);
            seat.rank = -1;
            return false;
        }
    }
    seat.rank = places_[static_cast<size_t>(seat.id)].rank;
    seat.count = count_;
    return true;
}

template <class Done>
void Pool::wait(const Done& done, bool lost) {
    if (done()) return;
    const auto start = Clock::now();
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
        if (done()) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_.fetch_add(1);
    if (lost && !done() && (asleep_since_ == Clock::time_point{} || start < asleep_since_)) asleep_since_ = start;
    met_.wait(lock, done);
    waiting_.fetch_sub(1);
}

// Called while nobody of the team can fall asleep, except who has to wait for the very caller.
void Pool::account() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asleep_since_ != Clock::time_point{}) lost_ += Clock::now() - asleep_since_;
    asleep_since_ = {};
}

bool Pool::slow() const {
    return lost_ > kHiccup && lost_ > std::chrono::duration_cast<Clock::duration>(kLost * (Clock::now() - begun_));
}

// Half of the team stays, the last to arrive among them: it has its core, and those that sleep may have lost theirs.
void Pool::shrink(const Seat& last) {
    const int kept = count_ / 2;
    for (Place& place : places_) {
        if (place.rank < 0) continue;
        const int distance = (place.rank - last.rank + count_) % count_;
        place.rank = distance < kept ? distance : -1;
        if (place.rank >= 0) continue;
        place.dismissed.store(true, std::memory_order_relaxed);
        inside_.fetch_sub(1);
    }
    count_ = kept;
}

void Pool::learn(int started) {
    const bool trial = rest_ == 0;
    if (count_ < started || slow()) {
        limit_ = count_ < started ? count_ : started / 2;
        patience_ = std::min(2 * patience_, kMostPatience);
        rest_ = patience_;
    } else if (trial) {
        limit_ = threads_;
        patience_ = std::max(1, patience_ / 2);
    } else {
        --rest_;
    }
}

void Pool::work(int thread) {
    const Place& place = places_[static_cast<size_t>(thread)];
    unsigned seen = 0;
    for (;;) {
        const auto start = Clock::now();
        for (int spins = 1; place.invited.load(std::memory_order_acquire) == seen; ++spins) {
            relax();
            if (spins % 64 == 0 && Clock::now() - start > kSpin) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return place.invited.load() != seen; });
                sleeping_.fetch_sub(1);
            }
        }
        seen = place.invited.load(std::memory_order_acquire);
        if (closing_) return;  // written before the invitation that we have just acquired
        take_part(thread);
    }
}

}  // namespace outpace
