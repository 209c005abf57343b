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
    : LearnedRows(std::move(layers), eagle.layers_read()), eagle_(eagle), limits_(limits) {}

float* EagleRows::append(int64_t row, int entry, int32_t token) {
    Row& to = made(row);
    to.at.push_back(entry);
    to.tokens.push_back(token);
    to.states.resize(to.states.size() + wide());
    return to.states.data() + to.states.size() - wide();
}

// Of the entries whose hidden states are kept the first n.
void EagleRows::drop(Row& row, int n) {
    row.at.erase(row.at.begin(), row.at.begin() + n);
    row.tokens.erase(row.tokens.begin(), row.tokens.begin() + n);
    row.states.erase(row.states.begin(), row.states.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(n) * wide()));
}

void EagleRows::has_read(Row& row, int n) {
    if (n <= 0) return;
    for (int i = row.had; i < row.had + n; ++i) {
        const int entry = row.at[static_cast<size_t>(i)];
        if (!row.spans.empty() && row.spans.back().second == entry)
            ++row.spans.back().second;
        else
            row.spans.emplace_back(entry, entry + 1);
    }
    drop(row, row.had + n - 1);
    row.had = true;
}

bool EagleRows::unread_last(Row& row) {
    if (!row.had || row.spans.empty() || row.spans.back().second != row.at[0] + 1) return false;
    if (--row.spans.back().second == row.spans.back().first) row.spans.pop_back();
    row.had = false;
    return true;
}

void EagleRows::fork(int64_t src, int64_t dst, int known) {
    Row made = rows_.at(src);
    while (!made.spans.empty() && made.spans.back().first >= known) made.spans.pop_back();
    if (!made.spans.empty()) made.spans.back().second = std::min(made.spans.back().second, known);
    const auto n = static_cast<size_t>(std::lower_bound(made.at.begin(), made.at.end(), known) - made.at.begin());
    made.at.resize(n), made.tokens.resize(n), made.states.resize(n * wide());
    made.had = made.had && n > 0;
    rows_[dst] = std::move(made);
}

void EagleRows::retire(int64_t row) {
    Row* known = find(row);
    if (!known || !known->had) return;
    drop(*known, 1);
    known->had = false;
}

// How many the row's draft may have.
int EagleRows::levels(const Asked& asked) const {
    const int most = limits_.most_levels < 0 && limits_.branch > 1 && !asked.adaptive ? limits_.fixed_levels : limits_.most_levels;
    const int depth = asked.floor > 0 ? std::min(asked.size, limits_.deepest) : asked.depth();
    return most < 0 ? depth : std::min(depth, most);
}

// The row, once the network has what it is known to have read: an interrupted call leaves more.
EagleRows::Row& EagleRows::settled(int64_t row) {
    Row& known = *find(row);
    const int cached = eagle_.row(static_cast<int>(row)), read = known.read();
    std::lock_guard<std::mutex> lock(eagle_.model().lock());
    if (cached >= 0 && eagle_.model().kv().length(cached) > read) eagle_.model().kv().truncate(cached, read);
    return known;
}

// Whether the row has entries to feed, and room for `more` behind them.
bool EagleRows::ready(int64_t row, int more) {
    if (!find(row)) return false;
    Row& known = settled(row);
    if (known.waiting() == 0) {
        if (!unread_last(known)) return false;
        settled(row);
    }
    return known.read() + known.waiting() + more <= limits_.max_length;
}

void EagleRows::forget(int64_t row) {
    release(row);
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
            const Row& known = *find(asked.row);
            asks.push_back({taken.row(asked.row), {known.unread_tokens(), known.unread_tokens() + known.waiting()}, unread_states(known),
                asked.size, levels(asked), limits_.branch, sampling_of(asked), asked.floor});
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
            Row& known = *find(rows[at[k]].row);
            has_read(known, known.waiting());
            trees[at[k]] = std::move(drafts[k]);
        }
        return;
    }
}

bool EagleRows::observe(const std::vector<Final>& rows, const States& states) {
    const size_t hidden = wide() / width();
    behind_.clear();
    for (const Final& final : rows) {
        Row& known = made(final.row);
        const int end = known.end();
        for (size_t n = 0; n < final.tokens.size(); ++n) {
            const int entry = final.first + static_cast<int>(n);
            if (entry < end) continue;
            copy(states, final.places[n], hidden, append(final.row, entry, final.tokens[n]));
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
            const Row& known = settled(row);
            asks.push_back({taken.row(row),
                {known.unread_tokens(), known.unread_tokens() + std::min(known.waiting() - 1, limits_.catch_up)}, unread_states(known)});
        }
        try {
            eagle_.draft(asks);
            for (size_t i = 0; i < rows.size(); ++i) has_read(*find(rows[i]), static_cast<int>(asks[i].tokens.size()));
            taken.keep();
        } catch (const MemoryLimit&) { forget(rows.back()); }
        std::vector<int64_t> left;
        for (const int64_t row : rows)
            if (const Row* known = find(row); known && known->waiting() > 1) left.push_back(row);
        rows = std::move(left);
    }
}

}  // namespace outpace
