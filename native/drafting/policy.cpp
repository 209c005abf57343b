#include "drafting/policy.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace outpace {

Policy::Policy(PolicyRules rules, PolicyCost cost)
    : rules_(std::move(rules)), cost_(std::move(cost)), tokens_(rules_.horizon), plain_tokens_(rules_.horizon) {
    for (Median& median : slowness_) median.value = 1.0;
}

// -- before drafting --------------------------------------------------------------------------------------------------

std::vector<int> Policy::plan(std::vector<View> rows, std::vector<int> most, std::vector<int64_t> contexts, int64_t prefill) {
    tick();
    views_ = std::move(rows);
    contexts_ = std::move(contexts);
    prefill_ = prefill;
    first_ = any_ = false;
    asked_ = verified_ = 0;
    plain_ = forward_ = extra_ = 0.0;
    looks_.clear();
    known_.clear();
    sizes_.assign(views_.size(), 0);
    bool all_wait = true;
    for (const View& view : views_) {
        const auto found = rows_.find(view.row);
        all_wait = all_wait && found != rows_.end() && found->second.wait > 0 && view.adaptive;
    }
    for (const View& view : views_) known_.push_back(&rows_.try_emplace(view.row, Row{view.kind}).first->second);
    if (all_wait) {
        for (Row* row : known_) --row->wait;
        return {};
    }
    sizes_ = std::move(most);
    if (views_.size() > 1) {
        double least = slack(*known_[0]);
        for (const Row* row : known_) least = std::min(least, slack(*row));
        if (least < 0)
            for (size_t i = 0; i < views_.size(); ++i)
                if (views_[i].adaptive) sizes_[i] = 0;
    }
    for (size_t i = 0; i < views_.size(); ++i) {
        Row& row = *known_[i];
        if (!views_[i].adaptive || !sizes_[i]) continue;
        if (row.wait) {
            --row.wait;
            sizes_[i] = 0;
        }
        sizes_[i] = std::min(sizes_[i], row.reach);
        first_ = first_ || (sizes_[i] && !row.proposals);
    }
    asked_ = std::any_of(sizes_.begin(), sizes_.end(), [](int size) { return size > 0; });
    return sizes_;
}

// -- after drafting ---------------------------------------------------------------------------------------------------

Policy::Choice Policy::trim(const Proposal& drafts) {
    const size_t rows = views_.size();
    Choice choice{std::vector<std::vector<int>>(rows), std::nullopt, std::vector<bool>(rows, false)};
    looks_.assign(rows, Look{});
    if (std::none_of(drafts.widths, drafts.widths + rows, [](int32_t width) { return width > 0; })) {
        if (timed()) forward_ = forward(contexts_);
        for (size_t i = 0; i < rows; ++i)
            if (sizes_[i] && views_[i].adaptive) ask_again(*known_[i], 0.0);
        return choice;
    }
    any_ = true;
    plain_ = plain_seconds(contexts_, prefill_);
    const double rate = this->rate();
    const int64_t width = static_cast<int64_t>(rows) + prefill_;
    const double floor = 0.5 * rate * cheapest(width);
    std::vector<Free> free;
    int fixed = 0;
    for (size_t i = 0; i < rows; ++i) {
        if (!drafts.widths[i]) continue;
        Look& seen = looks_[i];
        look(seen, *known_[i], views_[i].adaptive, drafts, i, floor);
        if (!seen.trims) {
            for (int n = 0; n < drafts.widths[i]; ++n) seen.kept.push_back(n);
            fixed += drafts.widths[i];
        } else if (trusted(*known_[i])) {
            for (size_t n = 0; n < seen.gains.size(); ++n)
                if (seen.gains[n] >= floor || n == 0) free.push_back({-seen.gains[n], static_cast<int>(i), static_cast<int>(n)});
        }
    }
    if (rows > 1 || drafts.parents) std::sort(free.begin(), free.end());
    int count = 0;
    double saved = 0.0;
    if (!free.empty()) std::tie(count, saved) = worth(free, width + fixed, fixed > 0, choice.expected);
    if (count && rows > 1) count = bearable(free, count, width + fixed);
    for (int n = 0; n < count; ++n) looks_[static_cast<size_t>(free[static_cast<size_t>(n)].row)].kept.push_back(free[static_cast<size_t>(n)].node);
    settle(width + fixed + count, count ? saved / count : 0.0);
    int64_t contexts = 0;
    for (size_t i = 0; i < rows; ++i) {
        choice.kept[i] = looks_[i].kept;
        choice.chosen[i] = looks_[i].trims;
        verified_ += static_cast<int>(looks_[i].kept.size());
        contexts += contexts_[i] * static_cast<int64_t>(looks_[i].kept.size());
    }
    if (verified_)
        extra_ = cost_.width(width + verified_) - cost_.width(width) + cost_.position_width * static_cast<double>(contexts);
    if (timed()) forward_ = forward(contexts_) + extra_;
    return choice;
}

void Policy::look(Look& seen, Row& row, bool adaptive, const Proposal& drafts, size_t i, double floor) {
    const size_t k = static_cast<size_t>(drafts.widths[i]), at = i * drafts.width;
    seen.there = true;
    seen.trims = adaptive && !(*drafts.sampled)[i];
    seen.chain = drafts.parents == nullptr;
    const double least = seen.trims ? floor : 0.0;
    std::vector<int> depths;
    for (size_t n = 0; n < k; ++n) {
        const int parent = seen.chain ? static_cast<int>(n) - 1 : drafts.parents[at + n];
        const double above = parent >= 0 ? seen.gains[static_cast<size_t>(parent)] : 1.0;
        if (above < least && seen.chain && n) break;
        const int depth = parent >= 0 ? depths[static_cast<size_t>(parent)] + 1 : 0;
        depths.push_back(depth);
        seen.parents.push_back(parent);
        Table& its = table((*drafts.sources)[drafts.source ? drafts.source[at + n] : 0], row.kind);
        double confidence = rules_.unknown;
        Bucket* bucket = &its.unsaid[static_cast<size_t>(std::min(depth, rules_.levels - 1))];
        if (drafts.said) {
            const double said = drafts.said[at + n], before = parent >= 0 ? drafts.said[at + static_cast<size_t>(parent)] : 1.0;
            confidence = parent < 0 ? said : before > 0 ? said / before : 0.0;
            const auto edge = std::upper_bound(rules_.edges.begin(), rules_.edges.end(), confidence);
            bucket = &its.said[parent >= 0][static_cast<size_t>(edge - rules_.edges.begin())];
        }
        double chance = this->chance(*bucket, std::min(std::max(confidence, 0.005), 0.995));
        chance = chance / (chance + (1.0 - chance) * row.odds[parent >= 0]);
        seen.gains.push_back(above * chance);
        seen.chances.push_back(chance);
        seen.buckets.push_back(bucket);
    }
}

// How many of the best nodes to verify, and the seconds that saves.
std::pair<int, double> Policy::worth(const std::vector<Free>& free, int64_t width, bool drafted, std::optional<double>& expected) {
    const double rows = static_cast<double>(views_.size()), rate = this->rate();
    const double sunk = std::max(drafting(asked_) - drafting(0), 0.0);
    const double start = plain_ + (drafted ? 0.0 : surcharge_), bare = cost_.width(width);
    int best = 0, fastest = 0;
    double value = 0.0, top = 0.0, tokens = 0.0;
    int64_t contexts = 0;
    for (int n = 1; n <= static_cast<int>(free.size()); ++n) {
        const Free& node = free[static_cast<size_t>(n) - 1];
        tokens -= node.negative;
        contexts += contexts_[static_cast<size_t>(node.row)];
        const double seconds = start + scale_ * (cost_.width(width + n) - bare + cost_.position_width * static_cast<double>(contexts));
        const double its = tokens - rate * (seconds - plain_);
        if (its > value) best = n, value = its;
        const double ratio = (rows + tokens) / (seconds + sunk);
        if (ratio > top) top = ratio, fastest = n;
    }
    if (top > rate) best = fastest;
    expected = top * plain_ / rows;
    return {best, value / rate};
}

int Policy::bearable(const std::vector<Free>& nodes, int count, int64_t width) {
    std::vector<double> slacks;
    for (const Row* row : known_) slacks.push_back(slack(*row));
    const double asked = drafting(asked_) - drafting(0) + surcharge_;
    int n = count;
    while (n) {
        std::vector<double> after = slacks;
        int64_t contexts = 0;
        for (int j = 0; j < n; ++j) {
            const Free& node = nodes[static_cast<size_t>(j)];
            after[static_cast<size_t>(node.row)] -= node.negative * plain_;
            contexts += contexts_[static_cast<size_t>(node.row)];
        }
        const double more = cost_.width(width + n) - cost_.width(width) + cost_.position_width * static_cast<double>(contexts);
        if (*std::min_element(after.begin(), after.end()) >= asked + scale_ * more) break;
        n -= std::max(1, n / 4);
    }
    return n;
}

void Policy::settle(int64_t width, double saved) {
    const double rate = this->rate();
    for (size_t i = 0; i < views_.size(); ++i) {
        Look& seen = looks_[i];
        Row& row = *known_[i];
        row.proposals += seen.there;
        if (!views_[i].adaptive || (seen.there && !seen.trims)) continue;
        double worth = 0.0;
        if (seen.there) {
            row.reach = std::max(rules_.least_reach, 2 * static_cast<int>(seen.kept.size()));
            if (!seen.kept.empty()) {
                std::sort(seen.kept.begin(), seen.kept.end());
                worth = saved * static_cast<double>(seen.kept.size());
            } else {
                const double loss = more(width, 1, contexts_[i]) + surcharge_ - seen.gains[0] / rate;
                if (may_try(row, std::max(loss, 0.0))) seen.kept = {0};
            }
        }
        if (sizes_[i]) ask_again(row, worth);
    }
}

// -- after the verdicts -----------------------------------------------------------------------------------------------

void Policy::learn(const std::vector<int>& accepted, const int32_t* path, size_t depth, const Seconds& seconds) {
    const double rows = static_cast<double>(views_.size());
    waited(seconds.total);
    const double asking = drafting(asked_) - drafting(0);
    if (!any_) {
        for (Row* row : known_) row->lead -= asking;
        time(seconds, false);
        average(1.0, 1.0);
        return;
    }
    const double lost = scale_ * extra_ + asking;
    int64_t all = 0;
    for (size_t i = 0; i < views_.size(); ++i) {
        Row& row = *known_[i];
        const Look& seen = looks_[i];
        all += accepted[i];
        row.lead += accepted[i] * plain_ - lost - (verified_ ? surcharge_ : 0.0);
        if (seen.kept.empty()) continue;
        if (static_cast<size_t>(accepted[i]) > depth) throw std::invalid_argument("more was accepted than the path has");
        count(row, seen, path + i * depth, accepted[i]);
        const double cost = lost * static_cast<double>(seen.kept.size()) / verified_;
        row.balance += accepted[i] * plain_ / rows - cost;
    }
    time(seconds, verified_ > 0);
    average((rows + static_cast<double>(all)) / rows, seconds.total / plain_);
}

void Policy::waited(double seconds) {
    for (Row* row : known_) {
        row->seconds += seconds / static_cast<double>(views_.size());
        row->wall += seconds;
    }
}

void Policy::count(Row& row, const Look& seen, const int32_t* path, int accepted) const {
    std::vector<bool> good(seen.gains.size(), false);
    for (int n = 0; n < accepted; ++n) good[static_cast<size_t>(seen.kept.at(static_cast<size_t>(path[n])))] = true;
    const double keep = 1.0 - 1.0 / rules_.memory;
    for (const int node : seen.kept) {
        const size_t at = static_cast<size_t>(node);
        const int parent = seen.parents[at];
        if (parent >= 0 && !good[static_cast<size_t>(parent)]) {
            if (seen.chain) break;
            continue;
        }
        Bucket& bucket = *seen.buckets[at];
        bucket.accepted = bucket.accepted * keep + good[at];
        bucket.tried = bucket.tried * keep + 1.0;
        double& bias = row.biases[parent >= 0];
        bias = std::max(-rules_.limit, std::min(rules_.limit, bias + rules_.rate * (good[at] - seen.chances[at])));
    }
    for (size_t deep = 0; deep < 2; ++deep) row.odds[deep] = std::exp(-row.biases[deep]);
}

void Policy::time(const Seconds& seconds, bool drafted) {
    if (forward_ == 0.0) return;
    add(slowness_[drafted], seconds.target / forward_);
    const double plain = slowness_[0].value;
    if (slowness_[1].samples.empty()) {
        scale_ = plain;
    } else {
        if (drafted) {
            bare_ = rules_.fading * bare_ + forward_ - extra_;
            beyond_ = rules_.fading * beyond_ + extra_;
        }
        double seen = slowness_[1].value;
        const bool alone = views_.size() == 1;
        if (!alone && beyond_ > 0) seen += (seen - plain) * bare_ / beyond_;
        scale_ = std::min(std::max(seen, 0.8 * plain), (alone ? rules_.alone : rules_.together) * plain);
    }
    if (!first_) add(drafting_[asked_], seconds.draft);
    add(overhead_[drafted], seconds.rest);
    if (!overhead_[0].samples.empty() && !overhead_[1].samples.empty())
        surcharge_ = std::max(overhead_[1].value - overhead_[0].value, 0.0);
}

void Policy::average(double tokens, double plain_steps) {
    const double keep = 1.0 - 1.0 / rules_.horizon;
    tokens_ = tokens_ * keep + tokens;
    plain_tokens_ = plain_tokens_ * keep + std::min(plain_steps, 4.0 + tokens);
    advantage_ = std::min(std::max(tokens_ / plain_tokens_, 1.0), 8.0);
}

void Policy::release(int row) {
    views_.clear();  // between two steps: what was known of the last one's rows is over
    known_.clear();
    rows_.erase(row);
    for (auto& [number, other] : rows_) other.wait = 0;
}

// -- calibration ------------------------------------------------------------------------------------------------------

void Policy::tick() {
    if (++ticks_ % rules_.fade_every) return;
    const auto fade = [this](std::vector<Bucket>& buckets) {
        for (Bucket& bucket : buckets) bucket.accepted *= rules_.fade, bucket.tried *= rules_.fade;
    };
    for (auto& [key, table] : tables_) {
        fade(table.said[0]);
        fade(table.said[1]);
        fade(table.unsaid);
    }
}

Policy::Table& Policy::table(int source, int kind) {
    const auto [found, made] = tables_.try_emplace({source, kind});
    if (made) {
        for (auto& said : found->second.said) said.resize(rules_.edges.size() + 1);
        found->second.unsaid.resize(static_cast<size_t>(rules_.levels));
    }
    return found->second;
}

double Policy::chance(const Bucket& bucket, double said) const {
    return (bucket.accepted + rules_.strength * said) / (bucket.tried + rules_.strength);
}

// -- timing -----------------------------------------------------------------------------------------------------------

void Policy::add(Median& median, double sample) const {
    const size_t window = static_cast<size_t>(rules_.window);
    if (median.samples.size() < window)
        median.samples.push_back(sample);
    else
        median.samples[median.next] = sample;
    median.next = (median.next + 1) % window;
    std::vector<double> sorted = median.samples;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    median.value = *middle;
}

double Policy::plain_seconds(const std::vector<int64_t>& contexts, int64_t prefill) const {
    const auto rows = static_cast<int64_t>(contexts.size());
    int64_t cached = 0;
    for (const int64_t context : contexts) cached += context;
    double seconds = cost_.width(rows + prefill) + cost_.row * static_cast<double>(rows - 1);
    seconds += static_cast<double>(cached) * (cost_.position + cost_.position_width);
    return slowness_[0].value * seconds + drafting(0) + overhead_[0].value;
}

double Policy::drafting(int forwards) const {
    const auto known = drafting_.find(forwards);
    if (known != drafting_.end()) return known->second.value;
    const auto none = drafting_.find(0);
    const double base = none == drafting_.end() ? 0.0 : none->second.value;
    if (!forwards) return base;
    const Median* near = nullptr;
    int best = 0;
    for (const auto& [f, median] : drafting_) {
        if (f == 0) continue;
        if (!near || std::pair(std::abs(f - forwards), f) < std::pair(std::abs(best - forwards), best)) near = &median, best = f;
    }
    return near ? base + std::max(near->value - base, 0.0) * forwards / best : base;
}

double Policy::more(int64_t width, int64_t nodes, int64_t context) const {
    return scale_ * (cost_.width(width + nodes) - cost_.width(width) +
                     static_cast<double>(context) * cost_.position_width * static_cast<double>(nodes));
}

double Policy::cheapest(int64_t width) {
    const auto [found, made] = cheapest_.try_emplace(width, 0.0);
    if (made) {
        const double bare = cost_.width(width);
        double least = cost_.width(width + 1) - bare;
        for (int n = 2; n < rules_.furthest; ++n) least = std::min(least, (cost_.width(width + n) - bare) / n);
        found->second = least;
    }
    return scale_ * found->second;
}

double Policy::forward(const std::vector<int64_t>& contexts) const {
    const auto rows = static_cast<int64_t>(contexts.size());
    double total = cost_.width(rows) + cost_.row * static_cast<double>(rows - 1);
    for (const int64_t context : contexts) total += static_cast<double>(context) * (cost_.position + cost_.position_width);
    return total;
}

bool Policy::timed() {
    ++steps_;
    return (steps_ < rules_.fresh || steps_ % rules_.sampled == 0) && !prefill_;
}

double Policy::rate() const { return advantage_ * static_cast<double>(views_.size()) / plain_; }

// -- rows -------------------------------------------------------------------------------------------------------------

bool Policy::trusted(const Row& row) const {
    return row.balance > -rules_.allowance * plain_ - rules_.forgiven * row.seconds;
}

bool Policy::may_try(Row& row, double loss) {
    const auto rows = static_cast<int64_t>(views_.size());
    if (row.tries * rows >= rules_.first_tries && row.spent + loss > rules_.explore * row.seconds) return false;
    ++row.tries;
    row.spent += loss;
    return true;
}

void Policy::ask_again(Row& row, double saved) {
    row.value += (saved - row.value) / 16;
    if (saved > 0) {
        row.fruitless = 0;
        row.waited = 4;
        return;
    }
    if (++row.fruitless < rules_.patience) return;
    const double asking = drafting(1);
    if (row.value < std::max(asking - drafting(0), asking / 3) / static_cast<double>(views_.size()))
        row.wait = row.waited = std::min(2 * row.waited, rules_.longest_wait);
}

}  // namespace outpace
