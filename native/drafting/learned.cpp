#include "drafting/learned.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace outpace {

LearnedRows::LearnedRows(std::vector<int> order, int count) : order_(std::move(order)), ascending_(order_) {
    if (static_cast<int>(width()) != count)
        throw std::invalid_argument("the network reads " + std::to_string(count) + " layers, not " + std::to_string(width()));
    std::sort(ascending_.begin(), ascending_.end());
    ascending_.erase(std::unique(ascending_.begin(), ascending_.end()), ascending_.end());
}

void LearnedRows::copy(const States& from, int place, size_t hidden, float* to) const {
    for (const int layer : order_) {
        const auto found = std::find(from.layers.begin(), from.layers.end(), layer);
        if (found == from.layers.end()) throw std::invalid_argument("the hidden states of layer " + std::to_string(layer) + " are missing");
        const size_t at = static_cast<size_t>(place) * from.layers.size() + static_cast<size_t>(found - from.layers.begin());
        std::memcpy(to, from.values + at * hidden, hidden * sizeof(float));
        to += hidden;
    }
}

EagleRows::EagleRows(Eagle& eagle, std::vector<int> layers, Limits limits)
    : LearnedRows(std::move(layers), eagle.layers_read()), eagle_(eagle), limits_(limits), entries_(static_cast<int>(eagle.wide())) {}

// How many the row's draft may have.
int EagleRows::levels(const Asked& asked) const {
    const int most = limits_.most_levels < 0 && limits_.branch > 1 && !asked.adaptive ? limits_.fixed_levels : limits_.most_levels;
    return most < 0 ? asked.depth() : std::min(asked.depth(), most);
}

// The row, once the network has what it is known to have read: an interrupted call leaves more.
Entries::Row& EagleRows::settled(int64_t row) {
    Entries::Row& known = *entries_.find(row);
    const int cached = eagle_.row(static_cast<int>(row)), read = known.read();
    std::lock_guard<std::mutex> lock(eagle_.model().lock());
    if (cached >= 0 && eagle_.model().kv().length(cached) > read) eagle_.model().kv().truncate(cached, read);
    return known;
}

// Whether the row has entries to feed, and room for `more` behind them.
bool EagleRows::ready(int64_t row, int more) {
    if (!entries_.find(row)) return false;
    Entries::Row& known = settled(row);
    if (known.at.empty()) {
        if (!entries_.unread_last(known)) return false;
        settled(row);
    }
    return known.read() + known.waiting() + more <= limits_.max_length;
}

void EagleRows::forget(int64_t row) {
    entries_.release(row);
    eagle_.drop(static_cast<int>(row));
}

void EagleRows::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.assign(rows.size(), {});
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        trees[i].levels = 0;
        if (levels(rows[i]) > 0 && ready(rows[i].row, levels(rows[i]))) at.push_back(i);
    }
    while (!at.empty()) {
        DraftNetwork::Taken taken(eagle_);
        std::vector<Eagle::Ask> asks;
        for (const size_t i : at) {
            const Asked& asked = rows[i];
            const Entries::Row& known = *entries_.find(asked.row);
            asks.push_back(
                {taken.row(asked.row), known.tokens, known.states.data(), asked.size, levels(asked), limits_.branch, sampling_of(asked)});
        }
        std::vector<Draft> drafts;
        try {
            drafts = eagle_.draft(asks);
        } catch (const MemoryLimit&) {
            forget(rows[at.back()].row);
            at.pop_back();
            continue;
        }
        taken.keep();
        for (size_t k = 0; k < at.size(); ++k) {
            Entries::Row& known = *entries_.find(rows[at[k]].row);
            entries_.has_read(known, known.waiting());
            trees[at[k]] = std::move(drafts[k]);
            trees[at[k]].levels = levels(rows[at[k]]);
        }
        return;
    }
}

bool EagleRows::observe(const std::vector<Final>& rows, const States& states) {
    const size_t hidden = entries_.wide() / width();
    behind_.clear();
    for (const Final& final : rows) {
        Entries::Row& known = entries_.at(final.row);
        const int end = known.end();
        for (size_t n = 0; n < final.tokens.size(); ++n) {
            const int entry = final.first + static_cast<int>(n);
            if (entry < end) continue;
            copy(states, final.places[n], hidden, entries_.append(known, entry, final.tokens[n]));
        }
        if (known.waiting() > limits_.catch_up) behind_.push_back(final.row);
    }
    return !behind_.empty();
}

// Feeds what waits, in calls of at most `catch_up` entries a row; the last one is left.
void EagleRows::read_ahead() {
    std::vector<int64_t> rows = std::exchange(behind_, {});
    while (!rows.empty()) {
        DraftNetwork::Taken taken(eagle_);
        std::vector<Eagle::Ask> asks;
        for (const int64_t row : rows) {
            const Entries::Row& known = settled(row);
            asks.push_back({taken.row(row), {known.tokens.begin(), known.tokens.begin() + std::min(known.waiting() - 1, limits_.catch_up)},
                known.states.data()});
        }
        try {
            eagle_.draft(asks);
            for (size_t i = 0; i < rows.size(); ++i) entries_.has_read(*entries_.find(rows[i]), static_cast<int>(asks[i].tokens.size()));
            taken.keep();
        } catch (const MemoryLimit&) { forget(rows.back()); }
        std::vector<int64_t> left;
        for (const int64_t row : rows)
            if (const Entries::Row* known = entries_.find(row); known && known->waiting() > 1) left.push_back(row);
        rows = std::move(left);
    }
}

}  // namespace outpace
