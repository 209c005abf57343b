#include "drafting/pace.h"

#include <algorithm>
#include <cmath>

namespace outpace {
namespace {

constexpr int kAt[Pace::kKnots] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128};
constexpr int kPerRow = 16;          // nodes a row that a curve covers
constexpr double kScale = 1.5;       // the prior's deviation, in what the table says: of all widths together,
constexpr double kPlace = 0.7;       // of one width by itself,
constexpr double kFixed = 0.08;      // and of what any draft adds, in plain steps
constexpr double kLeast = 0.05;      // plain steps a node that the prior allows for, however little the table says
constexpr double kReach = 1.5;       // doublings of the width over which `kPlace` hangs together
constexpr double kNoise = 0.08;      // deviation of log(seconds), until it is known
constexpr double kQuiet = 0.015, kLoud = 0.25;
constexpr double kWander = 0.01;     // of speed, a step
constexpr double kForget = 30000.0;  // steps after which the prior would be back
constexpr int kEvery = 16;           // steps between two times of forgetting
constexpr double kFar = 4.0;         // deviations that are far off
constexpr int kAgain = 3;            // plain steps far off that are believed
constexpr int kTwice = 2;             // drafted steps far off that are believed, with a plain one between them as ever
constexpr double kBelieved = 0.5;      // of log(seconds), that one such step is believed
constexpr double kAnew = 0.2;         // of the prior, that comes back with it
constexpr int kInVain = 8;           // drafted steps far off that are believed, where no plain step could be had
constexpr int kChunk = 32;           // prompt tokens from which a step's cost is by the token
constexpr double kBend = 3.0;        // most that a curve is thought to bend upwards from one knot to the next
constexpr double kKnown = 0.15;      // deviation, in plain steps, of what is known well
constexpr double kTiny = 0.002;      // least that a node is thought to add

int bucket_of(int rows) {  // exact up to 8, then ever coarser
    int step = 1;
    while (rows > 8 * step) step *= 2;
    return (rows + step - 1) / step * step;
}

int class_of(double context) {  // by doublings from 512
    int found = 0;
    while (found < 7 && context >= 512.0) context /= 2, ++found;
    return found;
}

// Whether n lies between knots k - 1 and k (knot -1: no nodes); beyond the last one, the last.
int above(int nodes, int knots) {
    int k = 0;
    while (k < knots - 1 && kAt[k] < nodes) ++k;
    return k;
}

}  // namespace

void Pace::turn(int rows, double cached, int64_t prefill) {
    ++clock_;
    rows_ = rows;
    prefill_ = prefill;
    base_ = cost_.width(rows) + cost_.row * (rows - 1) + cached * (cost_.position + cost_.position_width);
    const double context = cached / rows;
    const int bucket = bucket_of(rows), context_class = class_of(context), key = bucket * 8 + context_class;
    if (!now_ || now_->key != key) now_ = &curve(bucket, context_class, context);
    Curve& c = *now_;
    c.mean[0] += drift_ - c.drift;
    c.cov[0] += kWander * kWander * static_cast<double>(std::min<int64_t>(clock_ - c.used - 1, 200));
    c.drift = drift_;
    c.used = clock_;
    refresh();
}

void Pace::refresh() {
    Curve& c = *now_;
    plain_ = c.plain = base_ * std::exp(c.mean[0]);
    knots_ = c.knots;
    prompts_ = 0.0;
    linear_ = prefill_ >= kChunk;
    if (linear_) {  // what a token takes in such steps, where it was seen, bounds what one more takes
        const int64_t width = rows_ + prefill_;
        const double table = (cost_.width(width + 1) - cost_.width(width)) * plain_ / base_;
        const double each = std::max(token_ > 0 ? token_ : table, 1e-12) / plain_;
        for (int k = 0; k < knots_; ++k) mean_[k + 1] = each * kAt[k], sd_[k + 1] = 0.0;
        prompts_ = std::max((token_ > 0 ? token_ * static_cast<double>(width) : cost_.width(width) * plain_ / base_) / plain_ - 1.0, 0.0);
        return;
    }
    double least = 0.0;
    for (int k = 0; k < knots_; ++k) {
        const double bend = k ? kBend * std::max(mean_[k], kLeast * kAt[k - 1] / c.rows) * kAt[k] / kAt[k - 1] : c.mean[1];
        least = std::max({least, std::min(c.mean[k + 1], bend), kTiny * kAt[k]});
        mean_[k + 1] = least;
        sd_[k + 1] = std::sqrt(std::max(c.cov[static_cast<size_t>(k + 1) * kMost + k + 1], 0.0));
    }
    if (prefill_ == 0) return;
    const std::array<double, kKnots + 1> bare = mean_;  // a prompt's token costs what a node does
    prompts_ = line(bare, static_cast<int>(prefill_));
    for (int k = 1; k <= knots_; ++k)
        mean_[k] = std::max(line(bare, kAt[k - 1] + static_cast<int>(prefill_)) - prompts_, kTiny * kAt[k - 1]);
}

double Pace::line(const std::array<double, kKnots + 1>& values, int nodes) const {
    if (nodes <= 0) return 0.0;
    const int k = above(nodes, knots_);
    const double high = values[k + 1];
    if (nodes >= kAt[k]) return high * nodes / kAt[k];
    const double low = k ? values[k] : 0.0;
    const int from = k ? kAt[k - 1] : 0;
    return low + (high - low) * (nodes - from) / (kAt[k] - from);
}

// Two deviations; or, beyond what is known well, three times what the widest known costs by the node: curves bend
// upwards, but no further, and a table's nonsense says nothing about that.
double Pace::worst(int nodes) const {
    double bound = 2.0 * doubt(nodes);
    for (int k = knots_; k > 0; --k) {
        if (sd_[k] > kKnown || kAt[k - 1] > nodes) continue;
        return std::min(bound, kBend * std::max(mean_[k], kLeast) * nodes / kAt[k - 1] + sd_[k]);
    }
    return bound;
}

double Pace::cheapest(int from) const {
    const double bare = more(from);
    double least = more(from + 1) - bare;
    for (int k = 1; k < knots_; ++k) least = std::min(least, (more(from + kAt[k]) - bare) / kAt[k]);
    return std::max(least, 0.0);
}

bool Pace::wants_plain(double advantage) const {
    const Curve& c = *now_;
    if (prefill_) return false;
    if (c.doubted) return true;
    if (c.plains < 2) return c.inherited ? c.steps == 3 || c.steps == 40 : true;
    return c.since > std::max(32.0, 250.0 * (advantage - 1.0));
}

double Pace::prior(const Curve& c, int j, int k) const {
    const double apart = std::abs(std::log2(static_cast<double>(kAt[j]) / kAt[k])) / kReach;
    return c.prior[j] * c.prior[k] * (kScale * kScale + kPlace * kPlace * std::exp(-apart)) + kFixed * kFixed;
}

void Pace::spread(Curve& c, double share) const {
    std::array<bool, kKnots> open{};  // decided first: the covariance has to stay one
    for (int j = 0; j < c.knots; ++j) open[j] = c.cov[static_cast<size_t>(j + 1) * (kMost + 1)] <= prior(c, j, j);
    for (int j = 0; j < c.knots; ++j)
        for (int k = 0; k < c.knots; ++k)
            if (open[j] && open[k]) c.cov[static_cast<size_t>(j + 1) * kMost + k + 1] += share * prior(c, j, k);
}

Pace::Curve& Pace::curve(int rows, int context, double mean_context) {
    const int key = rows * 8 + context;
    Curve* near = nullptr;
    double nearest = 0.0;
    for (const auto& other : curves_) {
        if (other->key == key) return *other;
        const double apart = 4.0 * std::abs(std::log2(static_cast<double>(rows) / other->rows)) + std::abs(context - other->context);
        if (!near || apart < nearest) near = other.get(), nearest = apart;
    }
    auto made = std::make_unique<Curve>();
    Curve& c = *made;
    c.key = key, c.rows = rows, c.context = context;
    c.knots = 1 + above(kPerRow * rows, kKnots);
    c.noise = near ? near->noise : kNoise * kNoise;
    c.drift = drift_;
    c.used = clock_;
    const double plain = cost_.width(rows) + cost_.row * (rows - 1) + rows * mean_context * (cost_.position + cost_.position_width);
    for (int k = 0; k < c.knots; ++k) {
        const double table = (cost_.width(rows + kAt[k]) - cost_.width(rows) + cost_.position_width * mean_context * kAt[k]) / plain;
        c.mean[k + 1] = std::max(table, 0.0);
        c.prior[k] = std::max(table, kLeast * kAt[k] / rows);
    }
    if (!near) {
        c.cov[0] = 2.0;
        spread(c, 1.0);
    } else if (near->rows == rows) {  // only the context differs
        c.inherited = true;
        c.mean = near->mean;
        c.cov = near->cov;
        c.mean[0] += drift_ - near->drift;
        spread(c, 0.02);
        c.plains = std::min<int64_t>(near->plains, 1);
    } else {  // the table, corrected as it had to be there
        c.inherited = true;
        double ratio = 1.0;
        for (int k = 0; k < c.knots; ++k) {
            if (k < near->knots) ratio = (std::max(near->mean[k + 1], 0.0) + 0.1 * near->prior[k]) / (1.1 * near->prior[k]);
            c.mean[k + 1] = std::max(c.prior[k] * (1.1 * ratio - 0.1), 0.0);
        }
        c.mean[0] = near->mean[0] + drift_ - near->drift;
        c.cov[0] = 0.1;
        spread(c, 0.2);
    }
    if (curves_.size() == kCurves) {
        auto oldest = std::min_element(curves_.begin(), curves_.end(), [](const auto& a, const auto& b) { return a->used < b->used; });
        *oldest = std::move(made);
        return c;
    }
    curves_.push_back(std::move(made));
    return c;
}

void Pace::learn(int nodes, double seconds) {
    if (!(seconds > 0.0) || !std::isfinite(seconds) || !(base_ > 0.0)) return;
    if (prefill_) {
        if (!linear_) return;
        const double sample = seconds / static_cast<double>(rows_ + prefill_ + nodes);
        token_ = token_ > 0 ? token_ + 0.1 * (std::min(sample, 3 * token_) - token_) : sample;
        return;
    }
    Curve& c = *now_;
    const bool drafted = nodes > 0;
    const double seen = std::log(seconds / base_), before = c.mean[0];
    ++c.steps;
    if (drafted) ++c.since;
    c.cov[0] += kWander * kWander;
    std::array<double, kMost> at{};  // d more / d knots
    if (drafted) {
        const int k = above(nodes, c.knots);
        if (nodes >= kAt[k]) {
            at[k + 1] = static_cast<double>(nodes) / kAt[k];
        } else {
            const int from = k ? kAt[k - 1] : 0;
            at[k + 1] = static_cast<double>(nodes - from) / (kAt[k] - from);
            if (k) at[k] = 1.0 - at[k + 1];
        }
    }
    Update update = look(c, at, seen);
    const bool far = std::abs(update.first) > kFar * std::sqrt(update.variance + c.noise);
    if (far) {
        const double off = update.first;
        const bool slow = off > 0;  // faster than was thought is always true: nothing but the machine makes a step fast
        const int times = ++c.strange[drafted];
        if (slow && drafted && (times < kTwice || (c.doubted && times < kInVain))) {
            c.doubted = true;  // a stall, a slower machine, or a width that is dearer than was thought: a plain step tells
            return;
        }
        if (slow && !drafted && times < kAgain && !c.doubted) return;
        if (!drafted || c.doubted || !slow) c.cov[0] += off * off / (drafted ? 4 : 1);
        if (drafted) {
            spread(c, kAnew);
            const double by = (slow ? std::min(off, kBelieved) : off) * (1.0 + std::max(update.more, 0.0));
            for (int k = 1; k <= c.knots; ++k) c.cov[static_cast<size_t>(k) * kMost + k] += at[k] * by * by;
            update = look(c, at, slow ? seen - std::max(off - kBelieved, 0.0) : seen);
        } else {
            c.strange[1] = 0;
            update = look(c, at, seen);
        }
    } else {
        const double own = c.noise / (update.variance + c.noise);  // the share of what was off that is noise
        c.noise += 0.03 * (own * own * update.first * update.first + own * update.variance - c.noise);
        c.noise = std::min(std::max(c.noise, kQuiet * kQuiet), kLoud * kLoud);
    }
    c.strange[drafted] = 0;
    c.doubted = false;
    if (!drafted) {
        ++c.plains;
        c.since = 0;
    }
    c.mean = update.mean;
    const double weight = 1.0 / (update.total + c.noise);
    const int n = c.knots + 1;
    for (int j = 0; j < n; ++j)
        for (int k = 0; k < n; ++k) c.cov[static_cast<size_t>(j) * kMost + k] -= update.gain[j] * update.gain[k] * weight;
    drift_ += c.mean[0] - before;
    c.drift = drift_;
    if (c.steps % kEvery == 0) spread(c, kEvery / kForget);
    refresh();
}

// The filter's update for log(seconds / base) `seen`, iterated, since what a table says may be far off.
Pace::Update Pace::look(const Curve& c, const std::array<double, kMost>& at, double seen) const {
    const int n = c.knots + 1;
    Update found;
    found.mean = c.mean;
    std::array<double, kMost> h{};  // the observation's gradient
    for (int round = 0; round < 4; ++round) {
        double more = 0.0;
        for (int k = 1; k < n; ++k) more += at[k] * found.mean[k];
        const double bound = std::max(more, 0.0);
        h[0] = 1.0;
        for (int k = 1; k < n; ++k) h[k] = at[k] / (1.0 + bound);
        double variance = 0.0;
        for (int j = 0; j < n; ++j) {
            found.gain[j] = 0.0;
            for (int k = 0; k < n; ++k) found.gain[j] += c.cov[static_cast<size_t>(j) * kMost + k] * h[k];
            variance += h[j] * found.gain[j];
        }
        double off = seen - found.mean[0] - std::log1p(bound) - std::min(more, 0.0);  // below 0 it goes on as at 0
        for (int k = 0; k < n; ++k) off -= h[k] * (c.mean[k] - found.mean[k]);
        if (!round) found.first = off, found.variance = variance, found.more = more;
        found.total = variance;
        double moved = 0.0;
        for (int k = 0; k < n; ++k) {
            const double next = c.mean[k] + found.gain[k] / (variance + c.noise) * off;
            moved = std::max(moved, std::abs(next - found.mean[k]));
            found.mean[k] = next;
        }
        if (moved < 0.05) break;
    }
    return found;
}

std::vector<Pace::Learnt> Pace::learnt() const {
    std::vector<Learnt> found;
    for (const auto& c : curves_) {
        Learnt one{c->rows, c->context ? 256.0 * (1 << c->context) : 0.0, c->steps, c->plain, {}};
        for (int k = 0; k < c->knots; ++k)
            one.more.push_back({static_cast<double>(kAt[k]), std::max(c->mean[k + 1], 0.0),
                std::sqrt(std::max(c->cov[static_cast<size_t>(k + 1) * kMost + k + 1], 0.0))});
        found.push_back(std::move(one));
    }
    return found;
}

}  // namespace outpace
