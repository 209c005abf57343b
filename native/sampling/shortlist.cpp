#include "sampling/shortlist.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/functions.h"

namespace outpace {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();

bool before(const Shortlist::Entry& a, const Shortlist::Entry& b) { return a.score > b.score || (a.score == b.score && a.place < b.place); }

}  // namespace

void Shortlist::begin(int most) {
    most_ = most;
    entries_.clear();
    entries_.reserve(static_cast<size_t>(most) + 1);
}

void Shortlist::insert(const Entry& entry) {
    if (full() && !before(entry, entries_.back())) return;
    const auto at = std::upper_bound(entries_.begin(), entries_.end(), entry, before);
    if (at != entries_.begin() && (at - 1)->place == entry.place) return;  // known: its score is the same
    entries_.insert(at, entry);
    if (static_cast<int>(entries_.size()) > most_) entries_.pop_back();
}

Mass Shortlist::consider(
    const float* x, int first, int n, const int32_t* tokens, const Sampling& sampling, const Kernels& kernels, bool weighed) {
    const Best best = kernels.argmax(x, n);
    if (best.nan || std::isinf(best.value)) return {std::numeric_limits<float>::quiet_NaN(), 0.0};
    const bool sampled = sampling.temperature > 0.0;
    const Mass mass{best.value, sampled || !weighed ? 0.0 : weight_of(x, n, 1.0, best.value, kernels)};
    int32_t places[kStretch];
    const auto score = [&](int i) {
        return sampled ? static_cast<double>(x[i]) / sampling.temperature + gumbel(sampling, tokens[i]) : static_cast<double>(x[i]);
    };
    if (!full() || !sampled) {
        // The likeliest: without noise all that counts; with it, what sets the bar that others have to reach.
        Shortlist likely;
        if (sampled) likely.begin(most_);
        Shortlist& to = sampled ? likely : *this;
        for (int from = 0; from < n; from += 64) {  // the bar rises from one part to the next
            const int end = std::min(from + 64, n);
            const float bar = to.full() ? to.entries_.back().logit : kLowest;
            const int count = kernels.at_least(x, from, end, bar, places);
            for (int i = 0; i < count; ++i) to.insert({static_cast<double>(x[places[i]]), x[places[i]], first + places[i]});
        }
        if (!sampled) return mass;
        for (const Entry& entry : likely.entries_) insert({score(entry.place - first), entry.logit, entry.place});
    }
    // No bar yet: fewer tokens than the list holds have been seen, all of them in it.
    if (!full()) return mass;
    const int count = kernels.gumbel_survivors_of(x, tokens, n, static_cast<float>(1.0 / sampling.temperature),
        static_cast<float>(entries_.back().score), sampling.seed, sampling.index, sampling.sample, sampling.stream, places);
    for (int i = 0; i < count; ++i)
        if (x[places[i]] > -std::numeric_limits<float>::infinity()) insert({score(places[i]), x[places[i]], first + places[i]});
    return mass;
}

Mass whole(const Mass* stretches, int count) {
    Mass all{-std::numeric_limits<float>::infinity(), 0.0};
    for (int i = 0; i < count; ++i) {
        if (std::isnan(stretches[i].top)) return stretches[i];
        all.top = std::max(all.top, stretches[i].top);
    }
    const double top = all.top;
    for (int i = 0; i < count; ++i) all.sum += stretches[i].sum * exponential(static_cast<double>(stretches[i].top) - top);
    return all;
}

double log_sum(const float* logits, int n, const Best& best, const Kernels& kernels) {
    if (best.nan || std::isinf(best.value)) return std::numeric_limits<double>::quiet_NaN();
    double sum = 0.0;
    for (int first = 0; first < n; first += kStretch)
        sum += weight_of(logits + first, std::min(kStretch, n - first), 1.0, best.value, kernels);
    return best.value + natural_log(sum);
}

std::vector<double> Shortlist::shares(const Mass& whole, bool sampled) const {
    double top = whole.top, total = whole.sum;
    if (sampled && !entries_.empty()) {
        top = entries_.front().score;
        total = 0.0;
        for (const Entry& entry : entries_) total += exponential(entry.score - top);
    }
    std::vector<double> found;
    for (const Entry& entry : entries_) found.push_back(exponential(entry.score - top) / total);
    return found;
}

}  // namespace outpace
