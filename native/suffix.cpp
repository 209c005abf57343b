#include "suffix.h"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace outpace {

namespace {

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

int64_t pair_of(int32_t first, int32_t second) { return static_cast<int64_t>(first) << 32 | static_cast<uint32_t>(second); }

}  // namespace

SuffixIndex::SuffixIndex(int64_t capacity, int most, SuffixRules rules)
    : capacity_(capacity), most_(most), rules_(std::move(rules)) {
    if (capacity < 2 || capacity > INT32_MAX || most < 2)
        throw std::invalid_argument("capacity=" + std::to_string(capacity) + " must be 2 to 2147483647 and most=" +
                                    std::to_string(most) + " at least 2");
    if (rules_.weights.empty() || rules_.nearest < 1 || rules_.few < 1)
        throw std::invalid_argument("weights must not be empty, nearest and few at least 1");
}

void SuffixIndex::push(Chain& chain, int32_t at, int most) {
    chain.push_back(at);
    const auto size = static_cast<int64_t>(chain.size());
    if (size > 2 * most) chain.erase(chain.begin(), chain.begin() + (size - most - 1));  // one to spare
}

void SuffixIndex::add(int32_t token, int32_t before) {
    held_.push_back(token);
    if (token == kEnd) return;
    const auto at = static_cast<int32_t>(held_.size());
    push(singles_[token], at, rules_.few);
    if (before != kEnd) push(pairs_[pair_of(before, token)], at, rules_.nearest);
}

void SuffixIndex::append(const int32_t* tokens, size_t n) {
    int32_t before = held_.empty() ? kEnd : held_.back();
    for (size_t i = 0; i < n; ++i) {
        if (static_cast<int64_t>(held_.size()) >= capacity_) shrink(capacity_ / 2);
        add(tokens[i], before);
        before = tokens[i];
    }
}

void SuffixIndex::shrink(int64_t n) {
    const auto keep = std::min<int64_t>(std::max<int64_t>(n, 0), static_cast<int64_t>(held_.size()));
    const std::vector<int32_t> kept(held_.end() - keep, held_.end());
    std::vector<int32_t>().swap(held_);
    decltype(pairs_)().swap(pairs_);
    decltype(singles_)().swap(singles_);
    int32_t before = kEnd;
    for (const int32_t token : kept) {
        add(token, before);
        before = token;
    }
}

void SuffixIndex::places(const int32_t* context, size_t count, std::vector<Place>& found) const {
    const auto n = std::min<int64_t>(static_cast<int64_t>(count), most_);
    if (n == 0) return;
    const int32_t* last = context + count - 1;
    const auto end = static_cast<int32_t>(held_.size());
    const size_t begin = found.size();
    const auto newest = [](const Chain& chain, int most) {
        return std::max<int64_t>(0, static_cast<int64_t>(chain.size()) - most);
    };
    if (n > 1 && last[0] != kEnd && last[-1] != kEnd) {
        const auto chain = pairs_.find(pair_of(last[-1], last[0]));
        if (chain != pairs_.end())
            for (auto i = static_cast<int64_t>(chain->second.size()); i-- > newest(chain->second, rules_.nearest);) {
                const int32_t at = chain->second[static_cast<size_t>(i)];
                if (at == end) continue;
                int length = 2;
                const auto stop = std::min<int64_t>(n, at);
                while (length < stop && held_[static_cast<size_t>(at - 1 - length)] == *(last - length)) ++length;
                found.push_back({this, at, length});
            }
    }
    const size_t stop = found.size();
    if (stop - begin >= static_cast<size_t>(rules_.few)) return;
    const auto chain = singles_.find(last[0]);
    if (chain == singles_.end()) return;
    for (auto i = static_cast<int64_t>(chain->second.size()); i-- > newest(chain->second, rules_.few);) {
        const int32_t at = chain->second[static_cast<size_t>(i)];
        const auto same = [at](const Place& place) { return place.at == at; };
        const auto from = found.begin() + static_cast<int64_t>(begin), to = found.begin() + static_cast<int64_t>(stop);
        if (at != end && std::none_of(from, to, same)) found.push_back({this, at, 1});
    }
}

SuffixTree SuffixIndex::propose(const int32_t* context, size_t n, int budget,
                                const std::vector<const SuffixIndex*>& others, bool wide) const {
    SuffixTree tree;
    std::vector<Place> arena;  // places of all candidates so far; a candidate's are next to each other
    places(context, n, arena);
    for (const SuffixIndex* other : others) other->places(context, n, arena);
    std::priority_queue<Candidate> queue;
    std::vector<int32_t> path;
    std::vector<Vote> votes;
    std::vector<std::pair<size_t, size_t>> voters;  // (place, its vote)
    const auto own_end = static_cast<int64_t>(held_.size());
    const size_t longest = rules_.weights.size() - 1;
    size_t begin = 0, count = arena.size();
    int32_t node = -1;
    int order = 0;
    double probability = 1.0;
    while (true) {
        votes.clear();
        voters.clear();
        double total = rules_.doubt;
        for (size_t p = begin; p < begin + count; ++p) {
            const Place& place = arena[p];
            const auto& held = place.index->held_;
            int32_t token;
            if (place.at < static_cast<int64_t>(held.size())) {
                token = held[static_cast<size_t>(place.at)];
                if (token == kEnd) continue;
            } else if (place.index == this && place.at - own_end < static_cast<int64_t>(path.size())) {
                token = path[static_cast<size_t>(place.at - own_end)];  // a loop: its next turn is what was drafted
            } else {
                continue;
            }
            const double weight = rules_.weights[std::min(static_cast<size_t>(place.length), longest)];
            total += weight;
            size_t v = 0;
            while (v < votes.size() && votes[v].token != token) ++v;
            if (v == votes.size()) votes.push_back({token, 0.0, 0, 0});
            votes[v].weight += weight;
            ++votes[v].count;
            voters.emplace_back(p, v);
        }
        size_t next = arena.size();
        for (Vote& vote : votes) {
            vote.next = next;
            next += vote.count;
        }
        arena.resize(next);
        for (const auto& [p, v] : voters) {
            const Place place = arena[p];
            arena[votes[v].next++] = {place.index, place.at + 1, place.length + 1};
        }
        const double scale = probability / total;
        size_t first = 0, stop = votes.size();
        if (!wide && !votes.empty()) {
            for (size_t v = 1; v < votes.size(); ++v)
                if (votes[v].weight > votes[first].weight) first = v;
            stop = first + 1;
        }
        for (size_t v = first; v < stop; ++v) {
            const Vote& vote = votes[v];
            queue.push({vote.weight * scale, ++order, node, vote.token, vote.next - vote.count, vote.count});
        }
        if (queue.empty() || static_cast<int>(tree.tokens.size()) >= budget) return tree;
        const Candidate best = queue.top();
        queue.pop();
        node = static_cast<int32_t>(tree.tokens.size());
        tree.tokens.push_back(best.token);
        tree.parents.push_back(best.parent);
        tree.gains.push_back(best.probability);
        probability = best.probability;
        begin = best.begin;
        count = best.count;
        path.clear();
        for (int32_t at = node; at >= 0; at = tree.parents[static_cast<size_t>(at)])
            path.push_back(tree.tokens[static_cast<size_t>(at)]);
        std::reverse(path.begin(), path.end());
    }
}

}  // namespace outpace
