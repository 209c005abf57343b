#include "drafting/learned.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace outpace {

EagleRows::EagleRows(Eagle& eagle, std::vector<int> columns, Limits limits)
    : eagle_(eagle),
      columns_(std::move(columns)),
      layers_(columns_),
      limits_(limits),
      entries_(static_cast<int>(columns_.size()) * eagle.model().hidden()) {
    if (static_cast<int>(columns_.size()) != eagle.taps())
        throw std::invalid_argument("the network reads " + std::to_string(eagle.taps()) + " layers, not " + std::to_string(columns_.size()));
    std::sort(layers_.begin(), layers_.end());
    layers_.erase(std::unique(layers_.begin(), layers_.end()), layers_.end());
}

// How many the row's draft may have.
int EagleRows::levels(const Asked& asked) const {
    const int depth = asked.levels < 0 ? asked.size : std::min(asked.size, asked.levels);
    const int most = limits_.most_levels < 0 && limits_.branch > 1 && !asked.adaptive ? limits_.fixed_levels : limits_.most_levels;
    return most < 0 ? depth : std::min(depth, most);
}

std::vector<Eagle::Draft> EagleRows::draft(const std::vector<Eagle::Ask>& asks) {
    std::lock_guard<std::mutex> lock(eagle_.model().lock());
    return eagle_.draft(asks);
}

// The row, once the network has what it is known to have read: an interrupted call leaves more.
Entries::Row& EagleRows::settled(int64_t row) {
    Entries::Row& its = *entries_.find(row);
    const int cached = eagle_.row(static_cast<int>(row)), read = its.read();
    std::lock_guard<std::mutex> lock(eagle_.model().lock());
    if (cached >= 0 && eagle_.model().kv().length(cached) > read) eagle_.model().kv().truncate(cached, read);
    return its;
}

// Whether the row has entries to feed, and room for `more` behind them.
bool EagleRows::ready(int64_t row, int more) {
    if (!entries_.find(row)) return false;
    Entries::Row& its = settled(row);
    if (its.at.empty()) {
        if (!entries_.unread_last(its)) return false;
        settled(row);
    }
    return its.read() + its.waiting() + more <= limits_.max_length;
}

void EagleRows::forget(int64_t row) {
    entries_.release(row);
    eagle_.drop(static_cast<int>(row));
}

void EagleRows::propose(const std::vector<Asked>& rows, std::vector<SourcedTree>& trees) {
    trees.assign(rows.size(), {});
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        trees[i].levels = 0;
        if (levels(rows[i]) > 0 && ready(rows[i].row, levels(rows[i]))) at.push_back(i);
    }
    while (!at.empty()) {
        std::vector<Eagle::Ask> asks;
        std::vector<int> fresh;
        for (const size_t i : at) {
            const Asked& asked = rows[i];
            const Entries::Row& its = *entries_.find(asked.row);
            if (eagle_.take(static_cast<int>(asked.row))) fresh.push_back(static_cast<int>(asked.row));
            Sampling sampling;
            if (asked.sampling && asked.sampling->temperature > 0.0) {
                sampling.temperature = asked.sampling->temperature;
                sampling.seed = asked.sampling->seed;
                sampling.sample = asked.sampling->sample;
                sampling.index = static_cast<uint32_t>(static_cast<int64_t>(asked.n) - asked.prompt);
            }
            asks.push_back({eagle_.row(static_cast<int>(asked.row)), its.tokens, its.states.data(), asked.size, levels(asked), limits_.branch, sampling});
        }
        std::vector<Eagle::Draft> drafts;
        try {
            drafts = draft(asks);
        } catch (const MemoryLimit&) {
            for (const int row : fresh) eagle_.drop(row);
            forget(rows[at.back()].row);
            at.pop_back();
            continue;
        } catch (...) {
            for (const int row : fresh) eagle_.drop(row);
            throw;
        }
        for (size_t k = 0; k < at.size(); ++k) {
            Entries::Row& its = *entries_.find(rows[at[k]].row);
            entries_.has_read(its, its.waiting());
            SourcedTree& tree = trees[at[k]];
            tree.tokens = std::move(drafts[k].tokens);
            tree.parents = std::move(drafts[k].parents);
            tree.gains.assign(drafts[k].chances.begin(), drafts[k].chances.end());
            tree.sources.assign(tree.tokens.size(), 0);
            tree.levels = levels(rows[at[k]]);
        }
        return;
    }
}

bool EagleRows::observe(const std::vector<Final>& rows, const States& states) {
    std::vector<size_t> columns;
    for (const int layer : columns_) {
        const auto found = std::find(states.layers.begin(), states.layers.end(), layer);
        if (found == states.layers.end()) throw std::invalid_argument("layer " + std::to_string(layer) + " was not tapped");
        columns.push_back(static_cast<size_t>(found - states.layers.begin()));
    }
    const size_t hidden = entries_.wide() / columns_.size();
    behind_.clear();
    for (const Final& final : rows) {
        Entries::Row& its = entries_.at(final.row);
        const int known = its.end();
        for (size_t n = 0; n < final.tokens.size(); ++n) {
            const int entry = final.first + static_cast<int>(n);
            if (entry < known) continue;
            float* to = entries_.append(its, entry, final.tokens[n]);
            const float* from = states.values + static_cast<size_t>(final.places[n]) * states.layers.size() * hidden;
            for (size_t c = 0; c < columns.size(); ++c) std::memcpy(to + c * hidden, from + columns[c] * hidden, hidden * sizeof(float));
        }
        if (its.waiting() > limits_.catch_up) behind_.push_back(final.row);
    }
    return !behind_.empty();
}

// Feeds what waits, in calls of at most `catch_up` entries a row; the last one is left.
void EagleRows::read_ahead() {
    std::vector<int64_t> rows = std::exchange(behind_, {});
    while (!rows.empty()) {
        std::vector<Eagle::Ask> asks;
        std::vector<int> fresh, counts;
        for (const int64_t row : rows) {
            const Entries::Row& its = settled(row);
            const int n = std::min(its.waiting() - 1, limits_.catch_up);
            if (eagle_.take(static_cast<int>(row))) fresh.push_back(static_cast<int>(row));
            asks.push_back({eagle_.row(static_cast<int>(row)), {its.tokens.begin(), its.tokens.begin() + n}, its.states.data(), 0, 0, 0, Sampling{}});
            counts.push_back(n);
        }
        try {
            draft(asks);
            for (size_t i = 0; i < rows.size(); ++i) entries_.has_read(*entries_.find(rows[i]), counts[i]);
        } catch (const MemoryLimit&) {
            for (const int row : fresh) eagle_.drop(row);
            forget(rows.back());
        } catch (...) {
            for (const int row : fresh) eagle_.drop(row);
            throw;
        }
        std::vector<int64_t> left;
        for (const int64_t row : rows)
            if (const Entries::Row* its = entries_.find(row); its && its->waiting() > 1) left.push_back(row);
        rows = std::move(left);
    }
}

}  // namespace outpace
