// Several proposals as one tree: the likeliest paths, equal ones once; or all of them side by side.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <tuple>
#include <vector>

#include "drafting/draft.h"

namespace outpace {

inline Draft merge(const std::vector<Draft>& proposals, int budget) {
    struct Node {
        int32_t token;
        double gain;
        int source;
        int first = -1, last = -1, next = -1;  // children, in the order in which they were proposed; the next sibling
    };
    std::vector<Node> nodes{{-1, 1.0, 0}};  // the pending token, then the union
    std::vector<int> place;
    for (const Draft& tree : proposals) {
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
    Draft merged;
    std::priority_queue<std::tuple<double, int, int>> queue;  // gain, -node, parent in `merged`
    const auto open = [&](int node, double most, int at) {
        for (int child = nodes[static_cast<size_t>(node)].first; child >= 0; child = nodes[static_cast<size_t>(child)].next)
            queue.emplace(std::min(most, nodes[static_cast<size_t>(child)].gain), -child, at);
    };
    open(0, INFINITY, -1);
    while (!queue.empty() && static_cast<int>(merged.size()) < budget) {
        const auto [gain, negative, parent] = queue.top();
        queue.pop();
        const Node& node = nodes[static_cast<size_t>(-negative)];
        open(-negative, gain, merged.add(node.token, parent, gain, node.source));
    }
    return merged;
}

// All nodes of all proposals, one proposal after the other.
inline Draft side_by_side(const std::vector<Draft>& proposals) {
    Draft joined;
    for (const Draft& tree : proposals) {
        const auto before = static_cast<int32_t>(joined.size());
        for (size_t n = 0; n < tree.size(); ++n)
            joined.add(tree.tokens[n], tree.parents[n] < 0 ? -1 : tree.parents[n] + before, tree.gains[n], tree.sources[n]);
    }
    return joined;
}

}  // namespace outpace
