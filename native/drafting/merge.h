// Several proposals as one tree, best expected gain first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

#include "drafting/votes.h"

namespace outpace {

struct SourcedTree {
    std::vector<int32_t> tokens, parents;  // parents before children; -1: the pending token
    std::vector<double> gains;  // NaN: unknown
    std::vector<int> sources;
    int levels = -1;  // forwards that it took, one a level; -1: none that count
};

// Gains that a drafter does not say: a node's chance given its parent's is 0.7.
inline void assume(SourcedTree& tree) {
    for (size_t n = 0; n < tree.tokens.size(); ++n)
        if (std::isnan(tree.gains[n])) tree.gains[n] = 0.7 * (tree.parents[n] < 0 ? 1.0 : tree.gains[static_cast<size_t>(tree.parents[n])]);
}

inline SourcedTree merge(const std::vector<SourcedTree>& proposals, int budget) {
    struct Node {
        int32_t token;
        double gain;
        int source;
        int first = -1, last = -1, next = -1;  // children, in the order in which they were proposed; the next sibling
    };
    std::vector<Node> nodes{{kEnd, 1.0, 0}};  // the pending token, then the union
    std::vector<int> place;
    for (const SourcedTree& tree : proposals) {
        place.clear();
        for (size_t i = 0; i < tree.tokens.size(); ++i) {
            const int above = tree.parents[i] >= 0 ? place.at(static_cast<size_t>(tree.parents[i])) : 0;
            int node = nodes[static_cast<size_t>(above)].first;
            while (node >= 0 && nodes[static_cast<size_t>(node)].token != tree.tokens[i]) node = nodes[static_cast<size_t>(node)].next;
            if (node < 0) {
                node = static_cast<int>(nodes.size());
                nodes.push_back({tree.tokens[i], tree.gains[i], tree.sources[i]});
                Node& parent = nodes[static_cast<size_t>(above)];
                (parent.last < 0 ? parent.first : nodes[static_cast<size_t>(parent.last)].next) = node;
                parent.last = node;
            } else if (tree.gains[i] > nodes[static_cast<size_t>(node)].gain) {
                nodes[static_cast<size_t>(node)].gain = tree.gains[i];
                nodes[static_cast<size_t>(node)].source = tree.sources[i];
            }
            place.push_back(node);
        }
    }
    SourcedTree merged;
    std::priority_queue<std::tuple<double, int, int>> queue;  // gain, -node, parent in `merged`
    const auto open = [&](int node, double most, int at) {
        for (int child = nodes[static_cast<size_t>(node)].first; child >= 0; child = nodes[static_cast<size_t>(child)].next)
            queue.emplace(std::min(most, nodes[static_cast<size_t>(child)].gain), -child, at);
    };
    open(0, INFINITY, -1);
    while (!queue.empty() && static_cast<int>(merged.tokens.size()) < budget) {
        const auto [gain, negative, parent] = queue.top();
        queue.pop();
        const Node& node = nodes[static_cast<size_t>(-negative)];
        const int at = static_cast<int>(merged.tokens.size());
        merged.tokens.push_back(node.token);
        merged.parents.push_back(parent);
        merged.gains.push_back(gain);
        merged.sources.push_back(node.source);
        open(-negative, gain, at);
    }
    return merged;
}

}  // namespace outpace
