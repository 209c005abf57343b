#include "drafting/learned.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace outpace {

constexpr int kAny = std::numeric_limits<int>::max();

// -- entries ----------------------------------------------------------------------------------------------------------

float* Entries::append(Row& row, int entry, int32_t token) {
    row.at.push_back(entry);
    row.tokens.push_back(token);
    row.states.resize(row.states.size() + wide_);
    return row.states.data() + row.states.size() - wide_;
}

// Of the entries whose hidden states are kept the first n.
void Entries::drop(Row& row, int n) {
    row.tokens.erase(row.tokens.begin(), row.tokens.begin() + n);
    row.states.erase(row.states.begin(), row.states.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(n) * wide_));
}

void Entries::has_read(Row& row, int n) {
    if (n <= 0) return;
    drop(row, row.had() + n - 1);
    row.read += n;
}

bool Entries::unread_last(Row& row) {
    if (row.waiting() > 0 || row.had() == 0) return false;
    --row.read;
    return true;
}

void Entries::fork(int64_t src, int64_t dst, int before) {
    Row made = rows_.at(src);
    const auto n = static_cast<size_t>(std::lower_bound(made.at.begin(), made.at.end(), before) - made.at.begin());
    const size_t gone = made.at.size() - n, kept = made.tokens.size() - std::min(gone, made.tokens.size());
    made.at.resize(n), made.tokens.resize(kept), made.states.resize(kept * wide_);
    made.read = std::min(made.read, static_cast<int>(n));
    rows_[dst] = std::move(made);
}

// -- rows of any network ----------------------------------------------------------------------------------------------

LearnedRows::LearnedRows(std::vector<int> order, int count, size_t hidden, DraftNetwork* network, Reading reading)
    : entries_(order.size() * hidden), order_(std::move(order)), ascending_(order_), hidden_(hidden), network_(network), reading_(reading) {
    if (static_cast<int>(width()) != count)
        throw std::invalid_argument("the network reads " + std::to_string(count) + " layers, not " + std::to_string(width()));
    std::sort(ascending_.begin(), ascending_.end());
    ascending_.erase(std::unique(ascending_.begin(), ascending_.end()), ascending_.end());
}

// [width][hidden] of states at `place` among those of `from`. Throws std::invalid_argument where a layer is missing.
void LearnedRows::copy(const States& from, int place, float* to) const {
    for (const int layer : order_) {
        const auto found = std::find(from.layers.begin(), from.layers.end(), layer);
        if (found == from.layers.end()) throw std::invalid_argument("the hidden states of layer " + std::to_string(layer) + " are missing");
        const size_t at = static_cast<size_t>(place) * from.layers.size() + static_cast<size_t>(found - from.layers.begin());
        std::memcpy(to, from.values + at * hidden_, hidden_ * sizeof(float));
        to += hidden_;
    }
}

// The row, once the network has what it is known to have read: an interrupted call leaves more.
Entries::Row& LearnedRows::settled(int64_t row) {
    Entries::Row& known = *entries_.find(row);
    if (!network_) return known;
    const int cached = network_->row(static_cast<int>(row));
    std::lock_guard<std::mutex> lock(network_->model().lock());
    if (cached >= 0 && network_->model().kv().length(cached) > known.read) network_->model().kv().truncate(cached, known.read);
    return known;
}

// Whether the row can have a draft of so many levels; an entry that the network has is unread again where it would lack one.
bool LearnedRows::ready(const Asked& asked) {
    const int levels = this->levels(asked);
    if (levels < 1 || !entries_.find(asked.row)) return false;
    Entries::Row& known = settled(asked.row);
    if (reading_.left > 0 && known.waiting() == 0 && entries_.unread_last(known)) settled(asked.row);
    return fits(asked, known, levels);
}

void LearnedRows::forget(int64_t row) {
    entries_.release(row);
    if (network_) network_->drop(static_cast<int>(row));
}

void LearnedRows::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.assign(rows.size(), {});
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (stepwise()) trees[i].levels = 0;
        if (ready(rows[i])) at.push_back(i);
    }
    while (!at.empty()) {
        std::vector<Wanted> wanted;
        for (const size_t i : at) wanted.push_back({rows[i], *entries_.find(rows[i].row), levels(rows[i])});
        std::vector<Draft> drafts;
        try {
            drafts = draft(wanted);
        } catch (const MemoryLimit&) {
            forget(rows[at.back()].row);
            at.pop_back();
            continue;
        }
        for (size_t k = 0; k < at.size(); ++k) {
            Entries::Row& known = *entries_.find(rows[at[k]].row);
            entries_.has_read(known, known.waiting());
            trees[at[k]] = std::move(drafts[k]);
        }
        return;
    }
}

bool LearnedRows::observe(const std::vector<Final>& rows, const States& states) {
    behind_.clear();
    for (const Final& final : rows) {
        if (!network_) entries_.release(final.row);
        Entries::Row& known = entries_.made(final.row);
        const int end = known.end();
        for (size_t n = network_ ? 0 : final.places.size() - 1; n < final.places.size(); ++n)
            if (const int entry = final.first + static_cast<int>(n); entry >= end && entry < reading_.most)
                copy(states, final.places[n], entries_.append(known, entry, final.tokens[n]));
        if (known.waiting() > reading_.wait) behind_.push_back(final.row);
    }
    return !behind_.empty();
}

void LearnedRows::read_ahead() {
    std::vector<int64_t> rows = std::exchange(behind_, {});
    while (!rows.empty()) {
        std::vector<Part> parts;
        for (const int64_t row : rows) parts.emplace_back(row, std::min(settled(row).waiting() - reading_.left, reading_.piece));
        try {
            read(parts);
            for (const auto& [row, n] : parts) {
                Entries::Row& known = *entries_.find(row);
                entries_.has_read(known, n);
                if (reading_.left == 0) entries_.retire(known);
            }
        } catch (const MemoryLimit&) { forget(rows.back()); }
        std::vector<int64_t> left;
        for (const int64_t row : rows)
            if (const Entries::Row* known = entries_.find(row); known && known->waiting() > reading_.left) left.push_back(row);
        rows = std::move(left);
    }
}

// -- EAGLE ------------------------------------------------------------------------------------------------------------

EagleRows::EagleRows(Eagle& eagle, std::vector<int> layers, Limits limits)
    : LearnedRows(std::move(layers), eagle.layers_read(), static_cast<size_t>(eagle.model().hidden()), &eagle,
          {limits.catch_up, 1, limits.catch_up, kAny}),
      eagle_(eagle),
      limits_(limits) {}

int EagleRows::levels(const Asked& asked) const {
    if (eagle_.masked()) return std::min(asked.depth(), limits_.most_levels);
    const int most = limits_.most_levels < 0 && limits_.branch > 1 && !asked.adaptive ? limits_.fixed_levels : limits_.most_levels;
    const int depth = asked.floor > 0 ? std::min(asked.size, limits_.deepest) : asked.depth();
    return most < 0 ? depth : std::min(depth, most);
}

void EagleRows::read(const std::vector<Part>& parts) {
    DraftNetwork::Taken taken(eagle_);
    std::vector<Eagle::Ask> asks;
    for (const auto& [row, n] : parts) {
        const Entries::Row& known = *entries_.find(row);
        asks.push_back({taken.row(row), {known.unread_tokens(), known.unread_tokens() + n}, entries_.unread_states(known)});
    }
    eagle_.draft(asks);
    taken.keep();
}

std::vector<Draft> EagleRows::draft(const std::vector<Wanted>& rows) {
    DraftNetwork::Taken taken(eagle_);
    std::vector<Eagle::Ask> asks;
    for (const auto& [asked, known, levels] : rows)
        asks.push_back({taken.row(asked.row), {known.unread_tokens(), known.unread_tokens() + known.waiting()},
            entries_.unread_states(known), asked.size, levels, limits_.branch, sampling_of(asked), asked.floor});
    std::vector<Draft> drafts = eagle_.draft(asks);
    taken.keep();
    return drafts;
}

// -- block-parallel ---------------------------------------------------------------------------------------------------

ParallelRows::ParallelRows(Parallel& network, std::vector<int> layers, int branch, int most_levels, int max_length)
    : LearnedRows(
          std::move(layers), network.layers_read(), static_cast<size_t>(network.model().hidden()), &network, {0, 0, kAny, max_length}),
      network_(network),
      branch_(branch),
      most_levels_(most_levels),
      max_length_(max_length) {}

void ParallelRows::read(const std::vector<Part>& parts) {
    DraftNetwork::Taken taken(network_);
    std::vector<Parallel::Context> contexts;
    for (const auto& [row, n] : parts) {
        const Entries::Row& known = *entries_.find(row);
        contexts.push_back({taken.row(row), entries_.unread_states(known), {known.unread_at(), known.unread_at() + n}});
    }
    network_.read(contexts);
    taken.keep();
}

std::vector<Draft> ParallelRows::draft(const std::vector<Wanted>& rows) {
    std::vector<Parallel::Ask> asks;
    for (const auto& [asked, known, levels] : rows)
        asks.push_back({network_.row(static_cast<int>(asked.row)), asked.tokens[asked.n - 1], static_cast<int>(asked.n) - 1, levels,
            sampling_of(asked), asked.size, branch_});
    return network_.draft(asks);
}

// -- Medusa -----------------------------------------------------------------------------------------------------------

MedusaRows::MedusaRows(Medusa& network, int layer, std::vector<Node> tree)
    : LearnedRows({layer}, 1, static_cast<size_t>(network.target().hidden()), nullptr, {1, 1, 1, kAny}),
      network_(network),
      tree_(std::move(tree)) {
    for (size_t i = 0; i < tree_.size(); ++i) {
        const Node& node = tree_[i];
        const int head = node.parent < 0 ? 0 : tree_.at(static_cast<size_t>(node.parent)).head + 1;
        if (node.parent >= static_cast<int>(i) || node.head != head || head >= network.heads() || node.rank < 0)
            throw std::invalid_argument("a static tree's nodes follow their parents, a head a level");
        ranks_ = std::max(ranks_, node.rank + 1);
    }
}

std::vector<Draft> MedusaRows::draft(const std::vector<Wanted>& rows) {
    std::vector<Medusa::Ask> asks;
    for (const auto& [asked, known, levels] : rows) asks.push_back({entries_.unread_states(known), levels, sampling_of(asked)});
    const std::vector<std::vector<std::vector<RankedToken>>> found = network_.draft(asks, ranks_);
    std::vector<Draft> drafts(rows.size());
    for (size_t k = 0; k < rows.size(); ++k) {
        Draft& tree = drafts[k];
        std::vector<int> place(tree_.size(), -1);  // of the static tree's nodes in this one
        for (size_t i = 0; i < tree_.size() && static_cast<int>(tree.size()) < rows[k].asked.size; ++i) {
            const Node& node = tree_[i];
            const int parent = node.parent < 0 ? -1 : place[static_cast<size_t>(node.parent)];
            if ((node.parent >= 0 && parent < 0) || node.head >= static_cast<int>(found[k].size())) continue;
            const std::vector<RankedToken>& candidates = found[k][static_cast<size_t>(node.head)];
            if (node.rank >= static_cast<int>(candidates.size())) continue;
            const RankedToken& chosen = candidates[static_cast<size_t>(node.rank)];
            const double above = parent < 0 ? 1.0 : tree.gains[static_cast<size_t>(parent)];
            place[i] = tree.add(chosen.token, parent, above * std::min(chosen.share, 1.0));
        }
    }
    return drafts;
}

}  // namespace outpace
