// What is drafted for one row: the one value that drafters, compositions, the policy and a step hand on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace outpace {

struct Draft {
    std::vector<int32_t> tokens, parents;  // parents before children; -1: the pending token
    std::vector<double> gains;             // the chance of each node's whole path; NaN: unknown
    std::vector<int> sources;
    int levels = -1;  // drafting forwards, one a level; -1: as many as were allowed, or none that count

    size_t size() const { return tokens.size(); }
    bool empty() const { return tokens.empty(); }

    // The new node's index.
    int add(int32_t token, int32_t parent, double gain, int source = 0) {
        tokens.push_back(token), parents.push_back(parent), gains.push_back(gain), sources.push_back(source);
        return static_cast<int>(tokens.size()) - 1;
    }

    bool chain() const {
        for (size_t n = 0; n < size(); ++n)
            if (parents[n] != static_cast<int32_t>(n) - 1) return false;
        return true;
    }

    bool parents_first() const {
        for (size_t n = 0; n < size(); ++n)
            if (parents[n] < -1 || parents[n] >= static_cast<int32_t>(n)) return false;
        return true;
    }

    // Of each node, from 1 on.
    std::vector<int> depths() const {
        std::vector<int> found;
        for (const int32_t parent : parents) found.push_back(parent < 0 ? 1 : found[static_cast<size_t>(parent)] + 1);
        return found;
    }

    // Gains that its drafter does not give: a node's chance given its parent's is 0.7.
    void assume() {
        for (size_t n = 0; n < size(); ++n)
            if (std::isnan(gains[n])) gains[n] = 0.7 * (parents[n] < 0 ? 1.0 : gains[static_cast<size_t>(parents[n])]);
    }

    // Nodes `keep` alone (ascending, with their parents).
    Draft only(const std::vector<int32_t>& keep) const {
        Draft kept;
        kept.levels = levels;
        std::vector<int> place(size());
        for (const int32_t node : keep) {
            const auto n = static_cast<size_t>(node);
            const int32_t parent = parents.at(n);
            place[n] = kept.add(tokens[n], parent < 0 ? -1 : place[static_cast<size_t>(parent)], gains[n], sources[n]);
        }
        return kept;
    }
};

}  // namespace outpace
