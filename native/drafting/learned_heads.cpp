// Rows of block-parallel drafters and of Medusa's heads.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "drafting/learned.h"

namespace outpace {

ParallelRows::ParallelRows(Parallel& network, std::vector<int> layers, int max_length)
    : LearnedRows(std::move(layers), network.layers_read()), network_(network), max_length_(max_length) {}

void ParallelRows::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.assign(rows.size(), {});
    std::vector<Parallel::Ask> asks;
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Asked& asked = rows[i];
        const int slots = std::min(asked.depth(), network_.slots());
        if (slots < 1 || end(asked.row) == 0 || asked.n + static_cast<size_t>(slots) > static_cast<size_t>(max_length_)) continue;
        asks.push_back({network_.row(static_cast<int>(asked.row)), asked.tokens[asked.n - 1], static_cast<int>(asked.n) - 1, slots,
            sampling_of(asked)});
        at.push_back(i);
    }
    if (asks.empty()) return;
    const std::vector<std::vector<RankedToken>> drafts = network_.draft(asks);
    for (size_t k = 0; k < at.size(); ++k) {
        Draft& tree = trees[at[k]];
        double gain = 1.0;
        for (const RankedToken& slot : drafts[k]) {
            gain *= std::clamp(slot.share, 0.0, 1.0);
            tree.add(slot.token, static_cast<int32_t>(tree.size()) - 1, gain);
        }
    }
}

bool ParallelRows::observe(const std::vector<Final>& rows, const States& states) {
    const size_t wide = network_.wide(), hidden = wide / width();
    waiting_.clear();
    for (const Final& final : rows) {
        Read read{final.row, {}, {}};
        for (size_t n = 0; n < final.places.size(); ++n) {
            const int position = final.first + static_cast<int>(n);
            if (position < end(final.row) || position >= max_length_) continue;
            read.positions.push_back(position);
            read.states.resize(read.states.size() + wide);
            copy(states, final.places[n], hidden, read.states.data() + read.states.size() - wide);
        }
        if (!read.positions.empty()) waiting_.push_back(std::move(read));
    }
    return !waiting_.empty();
}

void ParallelRows::read_ahead() {
    std::vector<Read> rows = std::exchange(waiting_, {});
    while (!rows.empty()) {
        try {
            return read(rows);
        } catch (const MemoryLimit&) {
            release(rows.back().row);
            rows.pop_back();
        }
    }
}

void ParallelRows::read(const std::vector<Read>& rows) {
    DraftNetwork::Taken taken(network_);
    std::vector<Parallel::Context> contexts;
    for (const Read& read : rows) contexts.push_back({taken.row(read.row), read.states.data(), read.positions});
    network_.read(contexts);
    taken.keep();
    for (const Read& read : rows) {
        std::vector<int32_t>& known = positions_[read.row];
        known.insert(known.end(), read.positions.begin(), read.positions.end());
    }
}

void ParallelRows::fork(int64_t src, int64_t dst, int end) {
    const auto from = positions_.find(src);
    if (from == positions_.end()) return;
    const auto n = std::lower_bound(from->second.begin(), from->second.end(), end) - from->second.begin();
    if (n == 0) return;
    if (positions_.count(dst)) throw std::invalid_argument("row " + std::to_string(dst) + " is there already");
    DraftNetwork::Taken taken(network_);
    const int to = taken.row(dst);
    {
        std::lock_guard<std::mutex> lock(network_.model().lock());
        network_.model().kv().fork(network_.row(static_cast<int>(src)), to, static_cast<int>(n));
    }
    taken.keep();
    positions_[dst].assign(from->second.begin(), from->second.begin() + n);
}

void ParallelRows::release(int64_t row) {
    positions_.erase(row);
    network_.drop(static_cast<int>(row));
}

MedusaRows::MedusaRows(Medusa& network, int layer, std::vector<Node> tree)
    : LearnedRows({layer}, 1), network_(network), tree_(std::move(tree)) {
    for (size_t i = 0; i < tree_.size(); ++i) {
        const Node& node = tree_[i];
        const int head = node.parent < 0 ? 0 : tree_.at(static_cast<size_t>(node.parent)).head + 1;
        if (node.parent >= static_cast<int>(i) || node.head != head || head >= network.heads() || node.rank < 0)
            throw std::invalid_argument("a static tree's nodes follow their parents, a head a level");
        ranks_ = std::max(ranks_, node.rank + 1);
    }
}

bool MedusaRows::observe(const std::vector<Final>& rows, const States& states) {
    const size_t hidden = static_cast<size_t>(network_.target().hidden());
    for (const Final& final : rows) {
        State& state = states_[final.row];
        state.position = final.first + static_cast<int>(final.places.size());
        state.values.resize(hidden);
        copy(states, final.places.back(), hidden, state.values.data());
    }
    return false;
}

void MedusaRows::propose(const std::vector<Asked>& rows, std::vector<Draft>& trees) {
    trees.assign(rows.size(), {});
    std::vector<Medusa::Ask> asks;
    std::vector<size_t> at;
    for (size_t i = 0; i < rows.size(); ++i) {
        const Asked& asked = rows[i];
        const auto found = states_.find(asked.row);
        if (asked.depth() < 1 || found == states_.end() || found->second.position != static_cast<int>(asked.n) - 1) continue;
        asks.push_back({found->second.values.data(), std::min(asked.depth(), network_.heads()), sampling_of(asked)});
        at.push_back(i);
    }
    if (asks.empty()) return;
    const std::vector<std::vector<std::vector<RankedToken>>> drafts = network_.draft(asks, ranks_);
    for (size_t k = 0; k < at.size(); ++k) {
        Draft& tree = trees[at[k]];
        std::vector<int> place(tree_.size(), -1);  // of the static tree's nodes in this one
        for (size_t i = 0; i < tree_.size() && static_cast<int>(tree.tokens.size()) < rows[at[k]].size; ++i) {
            const Node& node = tree_[i];
            const int parent = node.parent < 0 ? -1 : place[static_cast<size_t>(node.parent)];
            if ((node.parent >= 0 && parent < 0) || node.head >= static_cast<int>(drafts[k].size())) continue;
            const std::vector<RankedToken>& candidates = drafts[k][static_cast<size_t>(node.head)];
            if (node.rank >= static_cast<int>(candidates.size())) continue;
            const RankedToken& chosen = candidates[static_cast<size_t>(node.rank)];
            const double above = parent < 0 ? 1.0 : tree.gains[static_cast<size_t>(parent)];
            place[i] = tree.add(chosen.token, parent, above * std::min(chosen.share, 1.0));
        }
    }
}

}  // namespace outpace
