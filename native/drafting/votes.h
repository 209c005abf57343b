// What followed earlier places, as a tree: the best-first search that the drafters `suffix` and `retrieval` share.
// tests/oracles/votes.py has it in plain Python, number for number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "drafting/draft.h"

namespace outpace {

constexpr int32_t kEnd = -1;  // stands between sequences: nothing is matched or continued across it

struct VoteRules {
    std::vector<double> weights;  // by length of the match; the last counts for all longer ones
    double doubt;                 // the weight of "something else"
};

namespace votes {

// A node that may be drafted next: `begin` and `count` are its places in the arena.
struct Candidate {
    double probability;
    int order;
    int32_t parent, token;
    size_t begin, count;
    bool operator<(const Candidate& other) const {  // the queue's top is the greatest: likeliest, then first found
        return probability != other.probability ? probability < other.probability : order > other.order;
    }
};

struct Vote {
    int32_t token;
    double weight;
    size_t count, next;
};

}  // namespace votes

// At most `budget` nodes, their gains falling. `arena`: the places that vote; a Place has `at` (of what follows) and `length` (of the match).
// `next(place, path)`: the token that follows there, or kEnd; `path` is drafted before it. `wide`: else only the likeliest.
template <class Place, class Next>
Draft grow(std::vector<Place>& arena, const VoteRules& rules, int budget, bool wide, const Next& next) {
    using votes::Candidate;
    using votes::Vote;
    Draft tree;
    std::priority_queue<Candidate> queue;
    std::vector<int32_t> path;
    std::vector<Vote> found;
    std::vector<std::pair<size_t, size_t>> voters;  // (place, its vote)
    const size_t longest = rules.weights.size() - 1;
    size_t begin = 0, count = arena.size();  // a candidate's places are next to each other
    int32_t node = -1;
    int order = 0;
    double probability = 1.0;
    while (true) {
        found.clear();
        voters.clear();
        double total = rules.doubt;
        for (size_t p = begin; p < begin + count; ++p) {
            const int32_t token = next(arena[p], path);
            if (token == kEnd) continue;
            const double weight = rules.weights[std::min(static_cast<size_t>(arena[p].length), longest)];
            total += weight;
            size_t v = 0;
            while (v < found.size() && found[v].token != token) ++v;
            if (v == found.size()) found.push_back({token, 0.0, 0, 0});
            found[v].weight += weight;
            ++found[v].count;
            voters.emplace_back(p, v);
        }
        size_t free = arena.size();
        for (Vote& vote : found) {
            vote.next = free;
            free += vote.count;
        }
        arena.resize(free);
        for (const auto& [p, v] : voters) {
            Place place = arena[p];
            ++place.at;
            ++place.length;
            arena[found[v].next++] = place;
        }
        const double scale = probability / total;
        size_t first = 0, stop = found.size();
        if (!wide && !found.empty()) {
            for (size_t v = 1; v < found.size(); ++v)
                if (found[v].weight > found[first].weight) first = v;
            stop = first + 1;
        }
        for (size_t v = first; v < stop; ++v) {
            const Vote& vote = found[v];
            queue.push({vote.weight * scale, ++order, node, vote.token, vote.next - vote.count, vote.count});
        }
        if (queue.empty() || static_cast<int>(tree.tokens.size()) >= budget) return tree;
        const Candidate best = queue.top();
        queue.pop();
        node = tree.add(best.token, best.parent, best.probability);
        probability = best.probability;
        begin = best.begin;
        count = best.count;
        path.clear();
        for (int32_t at = node; at >= 0; at = tree.parents[static_cast<size_t>(at)]) path.push_back(tree.tokens[static_cast<size_t>(at)]);
        std::reverse(path.begin(), path.end());
    }
}

}  // namespace outpace
