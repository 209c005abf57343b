// A draft that grows level by level from what a drafter finds likely after each node (dynamic trees: EAGLE-2, arXiv 2406.16858).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampling/ranking.h"

namespace outpace {

class Growth {
public:
    struct Node {
        int32_t token;
        int parent;     // a node before it; -1: the pending token
        int depth;      // from 1
        double chance;  // of its path: the product of its and its ancestors' shares
        int entry;      // which of the row's predicted entries has read it; -1: none
    };
    // At most `most` nodes in `levels` levels; of each level `branch` nodes have children, `branch` each, if their chances are at
    // least `floor`.
    Growth(int most, int levels, int branch, double floor) : most_(most), levels_(levels), branch_(branch), floor_(floor) {}

    // The next level: children of the nodes that `expand` named, in its order (first of all: of the pending token alone).
    void grow(const std::vector<std::vector<RankedToken>>& children);
    // Nodes of the last level whose children may yet be among the likeliest; empty: the draft is done. Each gets an entry.
    const std::vector<int>& expand();
    // Slots of node `n`'s ancestors and itself among the row's predicted entries, from depth 1 on, appended.
    void path(int n, std::vector<int32_t>& slots) const;

    const Node& node(int n) const { return nodes_[static_cast<size_t>(n)]; }
    int entries() const { return entries_; }
    int depth() const { return depth_; }
    static int most_entries(int most, int levels, int branch);  // that a draft can come to

    // The likeliest nodes, ancestors before descendants; parents count among these.
    std::vector<Node> likeliest() const;

private:
    std::vector<int> best(int from, int count) const;

    const int most_, levels_, branch_;
    const double floor_;
    std::vector<Node> nodes_;
    std::vector<int> parents_{-1};  // whose children come next
    int begin_ = 0;                 // of the last level
    int depth_ = 0, entries_ = 0;
};

}  // namespace outpace
