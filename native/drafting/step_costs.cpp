#include "drafting/step_costs.h"

#include <algorithm>
#include <cmath>

namespace outpace {
namespace {

constexpr double kBend = 1.3;   // most that a node beyond what was measured may cost, over one within
constexpr double kTiny = 0.02;  // plain steps that are too few to scale by; a tenth of it is the least that a node adds
constexpr double kMedianError = 1.86;  // a normal distribution's 1.253 / 0.6745: a median's error over the values' median distance
constexpr double kDoubt = 2.5;    // standard errors that a table's guess may be off before it is left
constexpr double kUnsure = 1.25;  // standard errors less than its ratios say that a size is charged at least
constexpr int kPlainEvery = 48;   // steps between plain ones that are made to measure, where nothing is gained by drafts
constexpr double kMostAlike = 1.5; // of Curve::alike, since few experts that all tokens choose together can read more by chance
constexpr int kAlikes = 4, kSteps = 64;  // steps that the first guess of it counts for, and over which it is averaged
constexpr double kSure = 12.0;    // ratios of a size from which on its drafts bring a plain step no sooner

int size_at(int k) { return 1 << k; }

int nearest(int nodes) {
    int k = 0;
    while (k < StepCosts::kSizes - 1 && 3 * size_at(k) < 2 * nodes) ++k;
    return k;
}

}  // namespace

void Ratios::add(double value) {
    values_[static_cast<size_t>(next_)] = static_cast<float>(value);
    next_ = (next_ + 1) % static_cast<int>(values_.size());
    count_ = std::min(count_ + 1, static_cast<int>(values_.size()));
    std::array<float, 32> sorted = values_;
    std::sort(sorted.begin(), sorted.begin() + count_);
    const double half = count_ / 2.0, width = std::sqrt(static_cast<double>(count_));
    const auto at = [&](double place) { return sorted[static_cast<size_t>(std::min(std::max(place, 0.0), count_ - 1.0))]; };
    low_ = at(half - width), high_ = at(std::ceil(half + width) - 1.0);
    middle_ = (at((count_ - 1) / 2) + at(count_ / 2)) / 2.0;
}

void Ratios::forget(int most) {
    const Ratios all = *this;
    *this = {};
    for (int n = std::min(all.count_, most); n > 0; --n) add(all.values_[static_cast<size_t>((all.next_ - n + 32) % 32)]);
}

StepCosts::StepCosts(CostTable table) : table_(std::move(table)) {
    for (int n = 0; n < Ratios::kEnough; ++n) noise_.add(kQuiet);
    const int tokens = std::min(static_cast<int>(table_.read.size()) - 1, 8);
    if (table_.mixes() && tokens > 1) alike_ = alike(table_.read[static_cast<size_t>(tokens)], tokens);
}

// Experts a layer that tokens read: E (1 - (1 - K/E)^n), of the n that would choose independently.
double StepCosts::read(int64_t tokens) const {
    const double n = 1.0 + static_cast<double>(tokens - 1) * now_->alike;
    return table_.experts * (1.0 - std::pow(1.0 - table_.used / table_.experts, n));
}

// What so many tokens that read so many experts say of `Curve::alike`.
double StepCosts::alike(double read, int tokens) const {
    const double most = table_.experts - 0.5;  // where all are read, more tokens say nothing
    const double n = std::log(1.0 - std::min(read, most) / table_.experts) / std::log(1.0 - table_.used / table_.experts);
    return std::min(std::max((n - 1.0) / (tokens - 1), 0.0), kMostAlike);
}

// Of a forward of so many tokens: the table's, whose tokens were others, with the experts that these are expected to read.
double StepCosts::seconds(int64_t tokens) const {
    const double found = table_.width(tokens);
    if (!table_.mixes() || tokens >= static_cast<int64_t>(table_.read.size())) return found;
    return std::max(found + table_.expert * (read(tokens) - table_.read[static_cast<size_t>(tokens)]), 0.1 * found);
}

void StepCosts::turn(int rows, double cached, int64_t prefill) {
    ++step_;
    rows_ = rows;
    prefill_ = prefill;
    context_ = cached / rows;
    int key = rows;
    if (rows > 8)
        for (key = 16; key < rows;) key *= 2;
    auto found = curves_.find(key);
    if (found == curves_.end()) {  // what the nearest one found out, until it is known better
        Curve fresh;
        const auto above = curves_.lower_bound(key);
        const Curve* near = above != curves_.end() ? &above->second : curves_.empty() ? nullptr : &curves_.rbegin()->second;
        fresh.alike = near ? near->alike : alike_;
        if (near)
            for (size_t k = 0; k < kSizes; ++k) (fresh.ratios[k] = near->ratios[k]).forget(Ratios::kEnough);
        found = curves_.emplace(key, fresh).first;
    }
    now_ = &found->second;
    plain_ = seconds(rows) + table_.row * (rows - 1) + cached * (table_.position + table_.position_width);
    draw(*now_);
}

double StepCosts::table(int nodes) const {
    const double more = seconds(rows_ + nodes) - seconds(rows_) + table_.position_width * context_ * nodes;
    return std::max(more / plain_, 0.0);
}

void StepCosts::draw(Curve& curve) {
    double least = 0.0, scale = 1.0;
    known_ = seen_ = 0;
    for (int k = 0; k < kSizes; ++k) {
        const size_t at = static_cast<size_t>(k);
        const Ratios& ratios = curve.ratios[at];
        const int size = size_at(k);
        const double said = table(size);
        double guess = said * scale;
        if (known_) {
            const double straight = std::max(least, kTiny * known_ / rows_) * size / known_;
            guess = std::min(std::max({guess, straight / kBend, least}), kBend * straight);
        }
        const double found = std::expm1(std::log1p(said) + corrected(std::log1p(guess) - std::log1p(said), ratios));
        curve.more[at] = least = std::max({found, least, 0.1 * kTiny * size});
        const bool enough = ratios.measured();
        const auto bound = [&](double log, double before) {
            return std::max({std::expm1(std::log1p(said) + log), before, 0.1 * kTiny * size});
        };
        curve.least[at] = enough ? std::min(least, bound(ratios.low(), k ? curve.least[at - 1] : 0.0)) : least;
        curve.most[at] = enough ? std::max(least, bound(ratios.high(), k ? curve.most[at - 1] : 0.0)) : least;
        if (ratios.count() && (enough || std::fabs(ratios.median()) <= error(ratios))) seen_ = size;
        if (enough) known_ = size, scale = (least + kTiny) / (said + kTiny);
    }
    prompts_ = 0.0;
    prompts_ = line(curve.more, prefill_);
}

double StepCosts::error(const Ratios& ratios) const {
    return kMedianError * noise_.median() / std::sqrt(static_cast<double>(std::max(ratios.count(), 1)));
}

// `guess`, unless four ratios or more contradict it: then the clearer they do, the nearer to their median (the non-negative
// garrote, Breiman 1995).
double StepCosts::corrected(double guess, const Ratios& ratios) const {
    const double apart = ratios.median() - guess, doubt = kDoubt * error(ratios);
    if (!ratios.measured() || std::fabs(apart) <= doubt) return guess;
    return guess + apart * (1.0 - doubt * doubt / (apart * apart));
}

// Whether what was measured of a size is more than one standard error off what is believed.
bool StepCosts::contradicts(const Curve& curve, int k) const {
    const Ratios& ratios = curve.ratios[static_cast<size_t>(k)];
    const double believed = std::log1p(curve.more[static_cast<size_t>(k)]) - std::log1p(table(size_at(k)));
    return std::fabs(ratios.median() - believed) > error(ratios);
}

double StepCosts::line(const std::array<double, kSizes>& more, int64_t nodes) {
    if (nodes <= 0) return 0.0;
    int k = 0;
    while (k < kSizes - 1 && size_at(k) < nodes) ++k;
    const double high = more[static_cast<size_t>(k)], at = static_cast<double>(nodes);
    if (!k || nodes > size_at(k)) return high * at / size_at(k);
    const double low = more[static_cast<size_t>(k) - 1], from = size_at(k - 1);
    return low + (high - low) * (at - from) / (size_at(k) - from);
}

bool StepCosts::measured(int nodes) const { return now_->ratios[static_cast<size_t>(nearest(nodes))].measured(); }

double StepCosts::seen(int nodes) const {
    const size_t k = static_cast<size_t>(nearest(nodes));
    const Ratios& ratios = now_->ratios[k];
    if (!ratios.count() || !nodes) return 0.0;
    const double size = size_at(static_cast<int>(k)),
                 raw = std::expm1(ratios.median() - kUnsure * error(ratios) + std::log1p(table(static_cast<int>(size))));
    return std::max(raw, 0.0) * std::min(nodes / size, 1.0);
}

double StepCosts::compared() const { return now_->ratios[static_cast<size_t>(nearest(last_.step < 0 ? 1 : last_.nodes))].count(); }

bool StepCosts::wants_plain(double advantage) const {
    if (prefill_) return false;
    if (step_ <= 2) return true;
    double every = kPlainEvery * std::max(1.0, 4.0 * (advantage - 1.0));
    if (last_.step == step_ - 1 && last_.rows == rows_ && last_.nodes) {  // a plain step now gives a ratio of that size
        const size_t k = static_cast<size_t>(nearest(last_.nodes));
        const Ratios& ratios = now_->ratios[k];
        if (!ratios.count()) return true;
        if (!ratios.measured() && contradicts(*now_, static_cast<int>(k))) return true;
        every *= std::min(1.0, ratios.count() / kSure);
    }
    return static_cast<double>(step_ - plain_at_) > every;
}

void StepCosts::learn(int nodes, double seconds, double experts) {
    if (prefill_ || !(seconds > 0.0) || !std::isfinite(seconds)) return;
    if (table_.mixes() && experts > 0.0) {  // as if it had read as many experts as were expected
        const double expected = plain_ * (1.0 + table(nodes));
        seconds *= expected / std::max(expected + table_.expert * (experts - read(rows_ + nodes)), 0.1 * expected);
    }
    ++now_->steps;
    if (!nodes) plain_at_ = step_, now_->plain += (seconds - now_->plain) * (now_->plain > 0 ? 0.1 : 1.0);
    if (last_.step == step_ - 1 && last_.rows == rows_ && !nodes != !last_.nodes) {
        const int size = std::max(nodes, last_.nodes), k = nearest(size);
        const double ratio = nodes ? seconds / last_.seconds : last_.seconds / seconds;
        const double shape = (more(size_at(k)) + kTiny) / (more(size) + kTiny);  // to the size that is kept
        now_->ratios[static_cast<size_t>(k)].add(std::log(std::max(1.0 + (ratio - 1.0) * shape, 0.1)) - std::log1p(table(size_at(k))));
    }
    if (last_.step == step_ - 1 && last_.rows == rows_ && !nodes == !last_.nodes)
        noise_.add(std::fabs(std::log(seconds) - std::log(last_.seconds) - std::log((1.0 + more(nodes)) / (1.0 + more(last_.nodes)))));
    last_ = {step_, rows_, nodes, seconds};
    if (table_.mixes() && experts > 0.0 && rows_ + nodes > 1)
        now_->alike += (alike(experts, rows_ + nodes) - now_->alike) / std::min(++now_->alikes + kAlikes, kSteps);
}

}  // namespace outpace
