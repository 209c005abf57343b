#include "runtime/pool.h"

#include <algorithm>
#include <ctime>
#include <system_error>

#include "platform.h"
#include "runtime/denormals.h"

namespace outpace {
namespace {

using std::chrono::microseconds;
using Clock = std::chrono::steady_clock;

// A thread spins for so many times the cost of a wake before it sleeps, within these bounds.
constexpr int kWakes = 8;
constexpr Clock::duration kLeastSpin = microseconds(50), kMostSpin = microseconds(500);
// With more threads than processors a spinner stands in the way of whom it waits for.
constexpr Clock::duration kCrowdedSpin = microseconds(5);
// How long an idle worker spins at the most: a decode loop comes back sooner, and an idle model must not burn a core.
constexpr Clock::duration kMostGap = std::chrono::milliseconds(2);
// A run is slow if waits that ended in sleep took longer than any hiccup, and so much of its undisturbed time that fewer threads,
// which wait for nobody, would have been as fast.
constexpr Clock::duration kHiccup = microseconds(500);
constexpr double kLost = 0.4;
// Others use the cores if threads were away for so much of what was lost; a wake from sleep, a tenth of such waits, counts, too.
constexpr double kAway = 0.5;
constexpr int kMostPatience = 16;
// Cores that differ by more get their work by claims: less comes of hiccups, and costs less than claiming.
constexpr double kUneven = 1.3;
constexpr int kSpeedRounds = 9, kSpeedSteps = 4000;
constexpr unsigned kPausesAClock = 32;  // looking at the clock costs as much as a few pauses

// Time that this thread has had a processor; constant where the system does not tell.
Clock::duration processor_time() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
    timespec used;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0)
        return std::chrono::duration_cast<Clock::duration>(std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec));
#endif
    return {};
}

}  // namespace

Pool::Pool(int threads)
    : threads_(std::max(1, threads)),
      places_(static_cast<size_t>(threads_)),
      processors_(allowed_processors()),
      spin_(kLeastSpin),
      idle_spin_(kCrowdedSpin.count()) {
    workers_.reserve(static_cast<size_t>(threads_));
    try {
        while (static_cast<int>(workers_.size()) + 1 < threads_) {
            const int i = static_cast<int>(workers_.size()) + 1;
            workers_.emplace_back([this, i] { work(i); });
        }
    } catch (const std::system_error&) {  // there are no more threads to be had: those that began are the team
        threads_ = static_cast<int>(workers_.size()) + 1;
    }
    for (Team& team : teams_) team.limit = threads_;
    calibrate();
}

// What it costs to run on threads that sleep, and on threads that spin: medians, in a few milliseconds.
void Pool::calibrate() {
    if (threads_ == 1 || threads_ > processors_) {
        if (threads_ > 1) spin_ = kCrowdedSpin;
        calibrated_ = true;
        return;
    }
    const auto nothing = [](Seat&) {};
    const auto timed = [&] {
        const auto start = Clock::now();
        run(nothing);
        return Clock::now() - start;
    };
    const auto median = [](std::array<Clock::duration, 9>& found) {
        std::nth_element(found.begin(), found.begin() + 4, found.end());
        return found[4];
    };
    std::array<Clock::duration, 9> wakes, hand_overs;
    spin_ = kMostGap;  // the caller stays awake
    for (auto& took : wakes) {
        const auto give_up = Clock::now() + kMostGap;
        while (sleeping_.load() < threads_ - 1 && Clock::now() < give_up) relax();
        for (const auto deep = Clock::now() + microseconds(50); Clock::now() < deep;) relax();  // they are on their way there
        took = timed();
    }
    idle_spin_.store(kMostGap.count());
    for (auto& took : hand_overs) took = timed();
    uneven_ = differ();
    const Clock::duration wake = median(wakes);
    wake_seconds_ = std::chrono::duration<double>(wake).count();
    hand_over_seconds_ = std::chrono::duration<double>(median(hand_overs)).count();
    spin_ = std::clamp(kWakes * wake, kLeastSpin, kMostSpin);
    gap_ = {};
    calibrated_ = true;
}

// Whether the same work takes one thread much longer than another, all of them at it: its least time of several, since a
// disturbance only adds.
bool Pool::differ() {
    std::vector<Clock::duration> least(static_cast<size_t>(threads_), Clock::duration::max());
    for (int round = 0; round < kSpeedRounds; ++round)
        run([&](Seat& me) {
            const auto start = Clock::now();
            uint64_t chains[4] = {1, 2, 3, 4};
            for (int i = 0; i < kSpeedSteps; ++i)
                for (uint64_t& x : chains) x = x * 6364136223846793005u + 1442695040888963407u;
            const auto took = Clock::now() - start;
            if ((chains[0] ^ chains[1] ^ chains[2] ^ chains[3]) != 0)  // as it is; so that the work is not left out
                least[static_cast<size_t>(me.id)] = std::min(least[static_cast<size_t>(me.id)], took);
        });
    const auto [fastest, slowest] = std::minmax_element(least.begin(), least.end());
    return *slowest != Clock::duration::max() && *slowest > kUneven * *fastest;
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

int Pool::run(const std::function<void(Seat&)>& body, unsigned kind, double work) {
    const int team = this->team(kind);
    begun_ = Clock::now();
    body_ = &body;
    kind_ = kind;
    lost_ = away_ = {};
    count_ = began_ = team;
    expected_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(expected(team, kind) * work));
    if (team > 1) {
        const Clock::duration gap = begun_ - ended_;
        gap_ = gap < kMostGap ? std::max(gap, gap_ - gap_ / 16) : Clock::duration{};
        if (calibrated_ && spin_ != kCrowdedSpin) idle_spin_.store(std::min(2 * gap_ + spin_, kMostGap).count(), std::memory_order_relaxed);
        keep_apart();
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
        wait(0, [this] { return inside_.load() == 0; }, stayed);  // nobody may be at work when `body` goes out of scope
        account();
    } else {
        Seat alone{0, 0, 1};
        compute(alone);
    }
    ended_ = Clock::now();
    if (calibrated_) learn(team, kind, work);
    return count_;
}

// Where the threads need every processor, a worker that wakes on the caller's would wait for the scheduler to part them: up
// to 4 ms, which the caller spends spinning. So workers are kept off the processor that the caller runs on.
void Pool::keep_apart() {
    if (threads_ != processors_) return;
    const int here = current_processor();
    if (here == callers_ || here < 0) return;
    std::vector<int> workers;
    for (size_t i = 1; i < static_cast<size_t>(threads_); ++i)
        if (const int worker = places_[i].thread.load()) workers.push_back(worker);
    if (!keep_off(here, processors_, workers.data(), workers.size())) return;
    callers_ = static_cast<int>(workers.size()) + 1 == threads_ ? here : -1;  // some have not begun yet: the next run sees to them
}

void Pool::compute(Seat& seat) const {
    if (kind_ == kSampling) return (*body_)(seat);
    const DenormalsAsZero mode;
    (*body_)(seat);
}

bool Pool::take_part(int thread) {
    Place& place = places_[static_cast<size_t>(thread)];
    Seat seat{thread, place.rank, count_};
    place.used = processor_time();
    place.slept = place.away = {};
    compute(seat);
    if (seat.rank < 0) return false;
    place.away = away(place);
    if (inside_.fetch_sub(1) == 1 && waiting_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        released_ = Clock::now();
        met_.notify_all();
    }
    return true;
}

bool Pool::meet(Seat& seat) {
    if (seat.count == 1) return true;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == seat.count - 1) {
        if (waiting_.load() > 0) {
            Place& place = places_[static_cast<size_t>(seat.id)];
            place.away = away(place);
            account();
            if (robbed()) shrink(seat);
        }
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);  // sequentially consistent, as is waiting_: see run
        if (waiting_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            asleep_since_ = {};
            released_ = Clock::now();
            met_.notify_all();
        }
    } else {
        wait(seat.id, [&] { return phase_.load() != phase; });
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
void Pool::wait(int thread, const Done& done, bool lost) {
    if (done()) return;
    const auto start = Clock::now();
    for (unsigned spins = 1; spins % kPausesAClock || Clock::now() - start < spin_; ++spins) {
        relax();
        if (done()) return;
    }
    Place& place = places_[static_cast<size_t>(thread)];
    const Clock::duration so_far = away(place);
    std::unique_lock<std::mutex> lock(mutex_);
    place.away = so_far;
    const auto asleep = Clock::now();
    waiting_.fetch_add(1);
    if (lost && !done() && (asleep_since_ == Clock::time_point{} || start < asleep_since_)) asleep_since_ = start;
    met_.wait(lock, done);
    waiting_.fetch_sub(1);
    place.slept += std::max(released_ - asleep, Clock::duration{});  // from then on it only lacked a processor
}

// How long a thread, which asks for itself, has had no processor since the run began, though it did not sleep.
Pool::Clock::duration Pool::away(const Place& place) const { return Clock::now() - begun_ - (processor_time() - place.used) - place.slept; }

// Called while nobody of the team can fall asleep, except who has to wait for the very caller.
void Pool::account() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asleep_since_ != Clock::time_point{}) lost_ += Clock::now() - asleep_since_;
    asleep_since_ = {};
    away_ = {};
    for (int i = 0; i < began_; ++i) away_ += places_[static_cast<size_t>(i)].away;
}

// Seconds a unit of work that a team is thought to take while nobody else uses the cores; 0: unknown.
double Pool::expected(int team, unsigned kind) const {
    const Team& its = teams_[kind];
    if (team < threads_) return its.smaller;
    return its.usual > 0.0 ? its.usual : its.smaller * its.limit / threads_;
}

bool Pool::slow() const {
    if (pretended_lost_ >= 0.0) return pretended_lost_ > kLost;
    const Clock::duration whole = std::max(Clock::now() - begun_, expected_ + lost_);
    return lost_ > kHiccup && lost_ > std::chrono::duration_cast<Clock::duration>(kLost * whole);
}

// A run is slow because others use the cores.
bool Pool::robbed() const {
    const bool away = pretended_away_ >= 0.0 ? pretended_away_ > kAway : away_ > std::chrono::duration_cast<Clock::duration>(kAway * lost_);
    return away && slow();
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

void Pool::learn(int started, unsigned kind, double work) {
    Team& its = teams_[kind];
    const bool trial = its.limit < threads_ && started == threads_;
    const double took = std::chrono::duration<double>(ended_ - begun_).count() / work;
    const bool fewer = count_ < started || robbed();
    if (started == threads_ && !slow()) its.usual = took;
    dropped_ += fewer;
    waited_ += !fewer && slow();
    if (fewer) {
        if (!trial) its.smaller = 0.0;
        its.limit = count_ < started ? count_ : std::max(1, started / 2);
        its.patience = trial ? std::min(2 * its.patience, kMostPatience) : 1;
        its.rest = its.patience;
    } else if (trial && its.smaller > 0.0 && took > its.smaller) {
        its.patience = std::min(2 * its.patience, kMostPatience);
        its.rest = its.patience;
    } else if (trial) {
        its.limit = threads_;
        its.patience = 1;
    } else if (its.rest > 0) {
        its.smaller = took;
        --its.rest;
    }
}

void Pool::work(int thread) {
    Place& place = places_[static_cast<size_t>(thread)];
    place.thread.store(current_thread());
    unsigned seen = 0;
    for (;;) {
        const auto start = Clock::now();
        for (unsigned spins = 1; place.invited.load(std::memory_order_acquire) == seen; ++spins) {
            relax();
            if (spins % kPausesAClock == 0 && (Clock::now() - start).count() > idle_spin_.load(std::memory_order_relaxed)) {
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
