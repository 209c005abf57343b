#include "model/grow.h"

#include <algorithm>
#include <numeric>

namespace outpace {

int Growth::most_entries(int most, int levels, int branch) { return levels < 2 ? 0 : (levels - 1) * std::min(branch, most); }

void Growth::grow(const std::vector<std::vector<RankedToken>>& children) {
    begin_ = static_cast<int>(nodes_.size());
    ++depth_;
    for (size_t i = 0; i < parents_.size(); ++i) {
        const double above = parents_[i] < 0 ? 1.0 : node(parents_[i]).chance;
        for (const RankedToken& child : children[i]) nodes_.push_back({child.token, parents_[i], depth_, above * child.share, -1});
    }
}

// The `count` likeliest nodes from `from` on, ascending; of equals the earlier. With a node go its ancestors, which are no less
// likely and stand before it.
std::vector<int> Growth::best(int from, int count) const {
    std::vector<int> order(nodes_.size() - static_cast<size_t>(from));
    std::iota(order.begin(), order.end(), from);
    if (static_cast<int>(order.size()) > count) {
        std::nth_element(order.begin(), order.begin() + count, order.end(),
            [this](int a, int b) { return node(a).chance > node(b).chance || (node(a).chance == node(b).chance && a < b); });
        order.resize(static_cast<size_t>(count));
        std::sort(order.begin(), order.end());
    }
    return order;
}

const std::vector<int>& Growth::expand() {
    parents_.clear();
    if (depth_ >= levels_) return parents_;
    // What is not among the likeliest now will not be later, nor will what follows it.
    const std::vector<int> kept = best(0, most_);
    for (const int n : best(begin_, branch_))
        if (node(n).chance > 0.0 && node(n).chance >= floor_ && std::binary_search(kept.begin(), kept.end(), n)) parents_.push_back(n);
    for (const int n : parents_) nodes_[static_cast<size_t>(n)].entry = entries_++;
    return parents_;
}

void Growth::path(int n, std::vector<int32_t>& slots) const {
    const size_t start = slots.size();
    for (; n >= 0; n = node(n).parent) slots.push_back(node(n).entry);
    std::reverse(slots.begin() + static_cast<std::ptrdiff_t>(start), slots.end());
}

std::vector<Growth::Node> Growth::likeliest() const {
    std::vector<int> place(nodes_.size(), -1);
    std::vector<Node> chosen;
    for (const int n : best(0, most_)) {
        place[static_cast<size_t>(n)] = static_cast<int>(chosen.size());
        chosen.push_back(node(n));
        if (chosen.back().parent >= 0) chosen.back().parent = place[static_cast<size_t>(chosen.back().parent)];
    }
    return chosen;
}

}  // namespace outpace
